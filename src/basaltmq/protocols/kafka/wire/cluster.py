"""APIs for replicas, log directories and the controller, which admin tools use, in the notation of notation.py."""

from typing import Final

APIS: Final = """
35 DescribeLogDirs 1-4 flexible 2+
  request
    topics [] ?
        topic string
        partitions []int32
  response
    throttle_time_ms int32
    error_code int16 3+
    results []
        error_code int16
        log_dir string
        topics []
            name string
            partitions []
                partition_index int32
                partition_size int64
                offset_lag int64
                is_future_key bool
        total_bytes int64 4+ =-1
        usable_bytes int64 4+ =-1

43 ElectLeaders 0-2 flexible 2+
  request
    election_type int8 1+
    topic_partitions [] ?
        topic string
        partitions []int32
    timeout_ms int32 =60000
  response
    throttle_time_ms int32
    error_code int16 1+
    replica_election_results []
        topic string
        partition_result []
            partition_id int32
            error_code int16
            error_message string ?

45 AlterPartitionReassignments 0-1 flexible 0+
  request
    timeout_ms int32 =60000
    allow_replication_factor_change bool 1+ =true
    topics []
        name string
        partitions []
            partition_index int32
            replicas []int32 ?
  response
    throttle_time_ms int32
    allow_replication_factor_change bool 1+ =true
    error_code int16
    error_message string ?
    responses []
        name string
        partitions []
            partition_index int32
            error_code int16
            error_message string ?

46 ListPartitionReassignments 0-0 flexible 0+
  request
    timeout_ms int32 =60000
    topics [] ?
        name string
        partition_indexes []int32
  response
    throttle_time_ms int32
    error_code int16
    error_message string ?
    topics []
        name string
        partitions []
            partition_index int32
            replicas []int32
            adding_replicas []int32
            removing_replicas []int32

55 DescribeQuorum 0-2 flexible 0+
  request
    topics []
        topic_name string
        partitions []
            partition_index int32
  response
    error_code int16
    error_message string 2+ ?2
    topics []
        topic_name string
        partitions []
            partition_index int32
            error_code int16
            error_message string 2+ ?2
            leader_id int32
            leader_epoch int32
            high_watermark int64
            current_voters []
                replica_id int32
                replica_directory_id uuid 2+
                log_end_offset int64
                last_fetch_timestamp int64 1+ =-1
                last_caught_up_timestamp int64 1+ =-1
            observers []
                replica_id int32
                replica_directory_id uuid 2+
                log_end_offset int64
                last_fetch_timestamp int64 1+ =-1
                last_caught_up_timestamp int64 1+ =-1
    nodes [] 2+
        node_id int32
        listeners []
            name string
            host string
            port uint16

74 ListConfigResources 0-1 flexible 0+
  request
    resource_types []int8 1+
  response
    throttle_time_ms int32
    error_code int16
    config_resources []
        resource_name string
        resource_type int8 1+ =16

75 DescribeTopicPartitions 0-0 flexible 0+
  request
    topics []
        name string
    response_partition_limit int32 =2000
    cursor {} ?
        topic_name string
        partition_index int32
  response
    throttle_time_ms int32
    topics []
        error_code int16
        name string ?
        topic_id uuid
        is_internal bool
        partitions []
            error_code int16
            partition_index int32
            leader_id int32
            leader_epoch int32 =-1
            replica_nodes []int32
            isr_nodes []int32
            eligible_leader_replicas []int32 ?
            last_known_elr []int32 ?
            offline_replicas []int32
        topic_authorized_operations int32 =-2147483648
    next_cursor {} ?
        topic_name string
        partition_index int32
"""
