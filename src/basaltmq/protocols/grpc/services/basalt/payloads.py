"""Fast parser for an EnqueueBatchRequest whose payloads all have the same size.

Workers mostly send such batches. The header of each payload is then at a regular offset, so comparing the bytes at
these offsets proves that the request contains nothing else. The payloads are copied once, out of the read buffer.
Protobuf copies them three times. Any other request is left to protobuf.

    EnqueueBatchRequest   | 0a | length u7 | queue | 1a | length varint | payload | 1a | length varint | payload | ...
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.protocols.grpc.http2.events import Chunk

_QUEUE: Final = 0x0A
_PAYLOAD: Final = 0x1A
_LENGTH_BYTES_MAX: Final = 4
"""Longest varint accepted: payloads are far below 256 MiB."""


def payloads_of(raw: Chunk) -> tuple[str, list[bytes]] | None:
    """Return queue and payloads of a request, or None if it contains anything else or payloads of different sizes."""
    if len(raw) < 4 or raw[0] != _QUEUE or raw[1] > 0x7F:
        return None
    begin = 2 + raw[1]
    name = bytes(raw[2:begin])
    head = bytes(raw[begin : begin + 1 + _LENGTH_BYTES_MAX])
    if len(head) < 2 or head[0] != _PAYLOAD or not name.isascii():
        return None
    payload_bytes = shift = 0
    for each in head[1:]:
        payload_bytes |= (each & 0x7F) << shift
        shift += 7
        if each <= 0x7F:
            break
    else:
        return None
    head_bytes = 1 + shift // 7
    stride = head_bytes + payload_bytes
    count, rest = divmod(len(raw) - begin, stride)
    if rest:
        return None
    for at in range(head_bytes):
        if bytes(raw[begin + at :: stride]) != head[at : at + 1] * count:
            return None
    return name.decode(), [each for (each,) in Struct(f"{head_bytes}x{payload_bytes}s").iter_unpack(raw[begin:])]
