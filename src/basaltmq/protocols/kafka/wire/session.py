"""Versions, authentication, SCRAM credentials, coordinators and producer ids, in the notation of notation.py."""

from typing import Final

APIS: Final = """
10 FindCoordinator 0-4 flexible 3+
  request
    key string 0-3
    key_type int8 1+
    coordinator_keys []string 4+
  response
    throttle_time_ms int32 1+
    error_code int16 0-3
    error_message string 1-3 ?1
    node_id int32 0-3
    host string 0-3
    port int32 0-3
    coordinators [] 4+
        key string
        node_id int32
        host string
        port int32
        error_code int16
        error_message string ?

17 SaslHandshake 0-1
  request
    mechanism string
  response
    error_code int16
    mechanisms []string

18 ApiVersions 0-4 flexible 3+
  request
    client_software_name string 3+
    client_software_version string 3+
  response
    error_code int16
    api_keys []
        api_key int16
        min_version int16
        max_version int16
    throttle_time_ms int32 1+
    supported_features [] 3+ tag:0
        name string
        min_version int16
        max_version int16
    finalized_features_epoch int64 3+ =-1 tag:1
    finalized_features [] 3+ tag:2
        name string
        max_version_level int16
        min_version_level int16

22 InitProducerId 0-4 flexible 2+
  request
    transactional_id string ?
    transaction_timeout_ms int32
    producer_id int64 3+ =-1
    producer_epoch int16 3+ =-1
  response
    throttle_time_ms int32
    error_code int16
    producer_id int64 =-1
    producer_epoch int16

50 DescribeUserScramCredentials 0-0 flexible 0+
  request
    users [] ?
        name string
  response
    throttle_time_ms int32
    error_code int16
    error_message string ?
    results []
        user string
        error_code int16
        error_message string ?
        credential_infos []
            mechanism int8
            iterations int32

51 AlterUserScramCredentials 0-0 flexible 0+
  request
    deletions []
        name string
        mechanism int8
    upsertions []
        name string
        mechanism int8
        iterations int32
        salt bytes
        salted_password bytes
  response
    throttle_time_ms int32
    results []
        user string
        error_code int16
        error_message string ?

36 SaslAuthenticate 0-2 flexible 2+
  request
    auth_bytes bytes
  response
    error_code int16
    error_message string ?
    auth_bytes bytes
    session_lifetime_ms int64 1+
"""
