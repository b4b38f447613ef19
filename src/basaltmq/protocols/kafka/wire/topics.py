"""APIs for topics, configs and the cluster, in the notation of notation.py."""

from typing import Final

APIS: Final = """
3 Metadata 0-12 flexible 9+
  request
    topics [] ?1
        topic_id uuid 10+
        name string ?10
    allow_auto_topic_creation bool 4+ =true
    include_cluster_authorized_operations bool 8-10
    include_topic_authorized_operations bool 8+
  response
    throttle_time_ms int32 3+
    brokers []
        node_id int32
        host string
        port int32
        rack string 1+ ?
    cluster_id string 2+ ?
    controller_id int32 1+ =-1
    topics []
        error_code int16
        name string ?12
        topic_id uuid 10+
        is_internal bool 1+
        partitions []
            error_code int16
            partition_index int32
            leader_id int32
            leader_epoch int32 7+ =-1
            replica_nodes []int32
            isr_nodes []int32
            offline_replicas []int32 5+
        topic_authorized_operations int32 8+ =-2147483648
    cluster_authorized_operations int32 8-10 =-2147483648

19 CreateTopics 0-7 flexible 5+
  request
    topics []
        name string
        num_partitions int32
        replication_factor int16
        assignments []
            partition_index int32
            broker_ids []int32
        configs []
            name string
            value string ?
    timeout_ms int32
    validate_only bool 1+
  response
    throttle_time_ms int32 2+
    topics []
        name string
        topic_id uuid 7+
        error_code int16
        error_message string 1+ ?
        num_partitions int32 5+ =-1
        replication_factor int16 5+ =-1
        configs [] 5+ ?5
            name string
            value string ?
            read_only bool
            config_source int8 =-1
            is_sensitive bool

20 DeleteTopics 0-6 flexible 4+
  request
    topics [] 6+
        name string ?6
        topic_id uuid 6+
    topic_names []string 0-5
    timeout_ms int32
  response
    throttle_time_ms int32 1+
    responses []
        name string ?6
        topic_id uuid 6+
        error_code int16
        error_message string 5+ ?

33 AlterConfigs 0-2 flexible 2+
  request
    resources []
        resource_type int8
        resource_name string
        configs []
            name string
            value string ?
    validate_only bool
  response
    throttle_time_ms int32
    responses []
        error_code int16
        error_message string ?
        resource_type int8
        resource_name string

60 DescribeCluster 0-2 flexible 0+
  request
    include_cluster_authorized_operations bool
    endpoint_type int8 1+ =1
    include_fenced_brokers bool 2+
  response
    throttle_time_ms int32
    error_code int16
    error_message string ?
    endpoint_type int8 1+ =1
    cluster_id string
    controller_id int32 =-1
    brokers []
        broker_id int32
        host string
        port int32
        rack string ?
        is_fenced bool 2+
    cluster_authorized_operations int32 =-2147483648

32 DescribeConfigs 0-4 flexible 4+
  request
    resources []
        resource_type int8
        resource_name string
        configuration_keys []string ?
    include_synonyms bool 1+
    include_documentation bool 3+
  response
    throttle_time_ms int32
    results []
        error_code int16
        error_message string ?
        resource_type int8
        resource_name string
        configs []
            name string
            value string ?
            read_only bool
            config_source int8 1+ =-1
            is_sensitive bool
            synonyms [] 1+
                name string
                value string ?
                source int8
            config_type int8 3+
            documentation string 3+ ?

37 CreatePartitions 0-3 flexible 2+
  request
    topics []
        name string
        count int32
        assignments [] ?
            broker_ids []int32
    timeout_ms int32
    validate_only bool
  response
    throttle_time_ms int32
    results []
        name string
        error_code int16
        error_message string ?

44 IncrementalAlterConfigs 0-1 flexible 1+
  request
    resources []
        resource_type int8
        resource_name string
        configs []
            name string
            config_operation int8
            value string ?
    validate_only bool
  response
    throttle_time_ms int32
    responses []
        error_code int16
        error_message string ?
        resource_type int8
        resource_name string
"""
