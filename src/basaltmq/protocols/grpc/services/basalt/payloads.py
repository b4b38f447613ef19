"""A batch of payloads of one size, cut out of the bytes it came in.

What workers send by the hundred is mostly alike. Such a request has one head before each payload, at regular places,
so that a look at these places tells that it is nothing else, and the payloads are copied once, from what the socket
gave. Protobuf copies them three times. Any other request, however valid, is left to it.

    EnqueueBatchRequest   | 0a | length u7 | queue | 1a | length varint | payload | 1a | length varint | payload | ...
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.protocols.grpc.http2.events import Chunk

_QUEUE: Final = 0x0A
_PAYLOAD: Final = 0x1A
_LENGTH_BYTES_MAX: Final = 4
"""Of a varint: payloads are far below 256 MiB."""


def payloads_of(raw: Chunk) -> tuple[str, list[bytes]] | None:
    """Queue and payloads of a request, if that is all there is and the payloads are of one size."""
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
