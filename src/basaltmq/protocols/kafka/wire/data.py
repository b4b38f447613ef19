"""APIs for records and offsets, in the notation of notation.py."""

from typing import Final

APIS: Final = """
0 Produce 0-9 flexible 9+
  request
    transactional_id string 3+ ?3
    acks int16
    timeout_ms int32
    topics []
        name string
        partitions []
            index int32
            records records ?
  response
    topics []
        name string
        partitions []
            index int32
            error_code int16
            base_offset int64 =-1
            log_append_time_ms int64 2+ =-1
            log_start_offset int64 5+ =-1
            record_errors [] 8+
                batch_index int32
                message string ?
            error_message string 8+ ?
    throttle_time_ms int32 1+

1 Fetch 4-17 flexible 12+
  request
    replica_id int32 0-14 =-1
    max_wait_ms int32
    min_bytes int32
    max_bytes int32 3+ =2147483647
    isolation_level int8 4+
    session_id int32 7+
    session_epoch int32 7+ =-1
    topics []
        topic string 0-12
        topic_id uuid 13+
        partitions []
            partition int32
            current_leader_epoch int32 9+ =-1
            fetch_offset int64
            last_fetched_epoch int32 12+ =-1
            log_start_offset int64 5+ =-1
            partition_max_bytes int32
    forgotten_topics [] 7+
        topic string 0-12
        topic_id uuid 13+
        partitions []int32
    rack_id string 11+
    cluster_id string 12+ ?12 tag:0
  response
    throttle_time_ms int32 1+
    error_code int16 7+
    session_id int32 7+
    topics []
        topic string 0-12
        topic_id uuid 13+
        partitions []
            partition int32
            error_code int16
            high_watermark int64 =-1
            last_stable_offset int64 4+ =-1
            log_start_offset int64 5+ =-1
            aborted_transactions [] 4+ ?
                producer_id int64
                first_offset int64
            preferred_read_replica int32 11+ =-1
            records records ?

2 ListOffsets 1-10 flexible 6+
  request
    replica_id int32
    isolation_level int8 2+
    topics []
        name string
        partitions []
            partition_index int32
            current_leader_epoch int32 4+ =-1
            timestamp int64
    timeout_ms int32 10+
  response
    throttle_time_ms int32 2+
    topics []
        name string
        partitions []
            partition_index int32
            error_code int16
            timestamp int64 =-1
            offset int64 =-1
            leader_epoch int32 4+ =-1

21 DeleteRecords 0-2 flexible 2+
  request
    topics []
        name string
        partitions []
            partition_index int32
            offset int64
    timeout_ms int32
  response
    throttle_time_ms int32
    topics []
        name string
        partitions []
            partition_index int32
            low_watermark int64 =-1
            error_code int16

23 OffsetForLeaderEpoch 0-4 flexible 4+
  request
    replica_id int32 3+ =-2
    topics []
        topic string
        partitions []
            partition int32
            current_leader_epoch int32 2+ =-1
            leader_epoch int32
  response
    throttle_time_ms int32 2+
    topics []
        topic string
        partitions []
            error_code int16
            partition int32
            leader_epoch int32 1+ =-1
            end_offset int64 =-1
"""
