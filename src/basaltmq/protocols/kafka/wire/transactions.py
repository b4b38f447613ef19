"""The transaction APIs, in the notation of notation.py."""

from typing import Final

APIS: Final = """
24 AddPartitionsToTxn 0-3 flexible 3+
  request
    transactional_id string
    producer_id int64
    producer_epoch int16
    topics []
        name string
        partitions []int32
  response
    throttle_time_ms int32
    results []
        name string
        results []
            partition_index int32
            error_code int16

25 AddOffsetsToTxn 0-3 flexible 3+
  request
    transactional_id string
    producer_id int64
    producer_epoch int16
    group_id string
  response
    throttle_time_ms int32
    error_code int16

26 EndTxn 0-3 flexible 3+
  request
    transactional_id string
    producer_id int64
    producer_epoch int16
    committed bool
  response
    throttle_time_ms int32
    error_code int16

28 TxnOffsetCommit 0-3 flexible 3+
  request
    transactional_id string
    group_id string
    producer_id int64
    producer_epoch int16
    generation_id int32 3+ =-1
    member_id string 3+
    group_instance_id string 3+ ?3
    topics []
        name string
        partitions []
            partition_index int32
            committed_offset int64
            committed_leader_epoch int32 2+ =-1
            committed_metadata string ?
  response
    throttle_time_ms int32
    topics []
        name string
        partitions []
            partition_index int32
            error_code int16

61 DescribeProducers 0-0 flexible 0+
  request
    topics []
        name string
        partition_indexes []int32
  response
    throttle_time_ms int32
    topics []
        name string
        partitions []
            partition_index int32
            error_code int16
            error_message string ?
            active_producers []
                producer_id int64
                producer_epoch int32
                last_sequence int32 =-1
                last_timestamp int64 =-1
                coordinator_epoch int32
                current_txn_start_offset int64 =-1

65 DescribeTransactions 0-0 flexible 0+
  request
    transactional_ids []string
  response
    throttle_time_ms int32
    transaction_states []
        error_code int16
        transactional_id string
        transaction_state string
        transaction_timeout_ms int32
        transaction_start_time_ms int64 =-1
        producer_id int64 =-1
        producer_epoch int16 =-1
        topics []
            topic string
            partitions []int32

66 ListTransactions 0-0 flexible 0+
  request
    state_filters []string
    producer_id_filters []int64
  response
    throttle_time_ms int32
    error_code int16
    unknown_state_filters []string
    transaction_states []
        transactional_id string
        producer_id int64
        transaction_state string
"""
