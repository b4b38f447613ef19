"""APIs for ACLs, in the notation of notation.py."""

from typing import Final

APIS: Final = """
29 DescribeAcls 1-3 flexible 2+
  request
    resource_type int8
    resource_name string ?
    pattern_type int8 =3
    principal string ?
    host string ?
    operation int8
    permission_type int8
  response
    throttle_time_ms int32
    error_code int16
    error_message string ?
    resources []
        resource_type int8
        resource_name string
        pattern_type int8 =3
        acls []
            principal string
            host string
            operation int8
            permission_type int8

30 CreateAcls 1-3 flexible 2+
  request
    creations []
        resource_type int8
        resource_name string
        pattern_type int8 =3
        principal string
        host string
        operation int8
        permission_type int8
  response
    throttle_time_ms int32
    results []
        error_code int16
        error_message string ?

31 DeleteAcls 1-3 flexible 2+
  request
    filters []
        resource_type int8
        resource_name string ?
        pattern_type int8 =3
        principal string ?
        host string ?
        operation int8
        permission_type int8
  response
    throttle_time_ms int32
    filter_results []
        error_code int16
        error_message string ?
        matching_acls []
            error_code int16
            error_message string ?
            resource_type int8
            resource_name string
            pattern_type int8 =3
            principal string
            host string
            operation int8
            permission_type int8
"""
