"""Heads of Arrow IPC messages, written from a template.

Building a record batch array by array costs a Python call per array; reading an IPC message costs one call. A message
has a head (a flatbuffer with the row count and the position of each buffer) and a body, which a frame body already is.
For one schema the flatbuffer always has the same structure. So Arrow creates it once for a sample, and its numbers are
overwritten in place:

    | 0xffffffff | length i32 | flatbuffer: ... body length i64 ... rows i64 ... nodes, buffers: pairs of i64 |

This module locates those numbers in the flatbuffer. It does not import Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct, unpack_from
from typing import Final

_I64: Final = Struct("<q")
_PREFIX_BYTES: Final = 8

_MESSAGE_HEADER: Final = 2
_MESSAGE_BODY_LENGTH: Final = 3
_BATCH_LENGTH: Final = 0
_BATCH_NODES: Final = 1
_BATCH_BUFFERS: Final = 2


class MessageHead:
    """Writes heads of messages with the schema of a sample, which has at least one row."""

    def __init__(self, sample: bytes) -> None:
        size = unpack_from("<i", sample, 4)[0]
        self._template = sample[: _PREFIX_BYTES + size]
        message = _PREFIX_BYTES + unpack_from("<I", sample, _PREFIX_BYTES)[0]
        self._body_length_at = self._field(message, _MESSAGE_BODY_LENGTH)
        batch = self._target(self._field(message, _MESSAGE_HEADER))
        self._rows_at = self._field(batch, _BATCH_LENGTH)
        nodes = self._target(self._field(batch, _BATCH_NODES))
        buffers = self._target(self._field(batch, _BATCH_BUFFERS))
        # A vector is its length followed by its items, here pairs of i64.
        self._nodes_at = nodes + 4
        self._buffers_at = buffers + 4
        self._nodes = Struct(f"<{2 * unpack_from('<I', sample, nodes)[0]}q")
        self._buffers = Struct(f"<{2 * unpack_from('<I', sample, buffers)[0]}q")

    def fill(self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_bytes: int) -> bytes:
        """Return a head. Nodes are (length, nulls) pairs in schema order, buffers are (begin, length) pairs."""
        head = bytearray(self._template)
        _I64.pack_into(head, self._body_length_at, body_bytes)
        _I64.pack_into(head, self._rows_at, rows)
        self._nodes.pack_into(head, self._nodes_at, *nodes)
        self._buffers.pack_into(head, self._buffers_at, *buffers)
        return bytes(head)

    def _field(self, table: int, number: int) -> int:
        """Return the position of a table's field."""
        vtable = table - unpack_from("<i", self._template, table)[0]
        offset: int = unpack_from("<H", self._template, vtable + 4 + 2 * number)[0]
        assert offset, f"field {number} of the sample message is missing"
        return table + offset

    def _target(self, at: int) -> int:
        """Return the position that the reference at `at` points to."""
        target: int = at + unpack_from("<I", self._template, at)[0]
        return target
