"""Properties of MQTT 5.0 (section 2.2.2): one value class for all packets."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class Properties(Struct, frozen=True, gc=False, kw_only=True):
    """All properties of a packet. None means that the packet does not have the property."""

    payload_format: int | None = None
    """1 if the payload is UTF-8 text."""
    message_expiry_s: int | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    subscription_ids: tuple[int, ...] = ()
    session_expiry_s: int | None = None
    assigned_client_id: str | None = None
    server_keep_alive_s: int | None = None
    authentication_method: str | None = None
    authentication_data: bytes | None = None
    request_problem_information: bool | None = None
    will_delay_s: int | None = None
    request_response_information: bool | None = None
    response_information: str | None = None
    server_reference: str | None = None
    reason_string: str | None = None
    receive_maximum: int | None = None
    topic_alias_maximum: int | None = None
    topic_alias: int | None = None
    maximum_qos: int | None = None
    retain_available: bool | None = None
    user: tuple[tuple[str, str], ...] = ()
    """User properties: names may repeat, and the order is significant."""
    maximum_packet_size: int | None = None
    wildcard_subscription_available: bool | None = None
    subscription_ids_available: bool | None = None
    shared_subscription_available: bool | None = None


NO_PROPERTIES: Final = Properties()
