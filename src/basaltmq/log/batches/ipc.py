"""The head of an Arrow IPC message, written over a template.

Building a record batch array by array costs a Python call per array; reading an IPC message costs one. A message is a
head (a flatbuffer that says how many rows, and where each buffer lies in the body) and the body, which a frame's body
already is. For one schema the flatbuffer always has the same shape, so it is made once by Arrow for a sample, and from
then on its numbers are overwritten in place:

    | 0xffffffff | length i32 | flatbuffer: ... body length i64 ... rows i64 ... nodes, buffers: pairs of i64 |

This module only knows where in a flatbuffer those numbers are. It does not import Arrow.
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
    """Heads of messages like a sample of at least one row."""

    def __init__(self, sample: bytes) -> None:
        size = unpack_from("<i", sample, 4)[0]
        self._template = sample[: _PREFIX_BYTES + size]
        message = _PREFIX_BYTES + unpack_from("<I", sample, _PREFIX_BYTES)[0]
        self._body_length_at = self._field(message, _MESSAGE_BODY_LENGTH)
        batch = self._target(self._field(message, _MESSAGE_HEADER))
        self._rows_at = self._field(batch, _BATCH_LENGTH)
        nodes = self._target(self._field(batch, _BATCH_NODES))
        buffers = self._target(self._field(batch, _BATCH_BUFFERS))
        # A vector is its length and then its items, here pairs of i64.
        self._nodes_at = nodes + 4
        self._buffers_at = buffers + 4
        self._nodes = Struct(f"<{2 * unpack_from('<I', sample, nodes)[0]}q")
        self._buffers = Struct(f"<{2 * unpack_from('<I', sample, buffers)[0]}q")

    def fill(self, rows: int, nodes: Sequence[int], buffers: Sequence[int], body_bytes: int) -> bytes:
        """A head: nodes are (length, nulls) pairs in the order of the schema, buffers (begin, length) pairs."""
        head = bytearray(self._template)
        _I64.pack_into(head, self._body_length_at, body_bytes)
        _I64.pack_into(head, self._rows_at, rows)
        self._nodes.pack_into(head, self._nodes_at, *nodes)
        self._buffers.pack_into(head, self._buffers_at, *buffers)
        return bytes(head)

    def _field(self, table: int, number: int) -> int:
        """Where a table keeps a field."""
        vtable = table - unpack_from("<i", self._template, table)[0]
        offset: int = unpack_from("<H", self._template, vtable + 4 + 2 * number)[0]
        assert offset, f"field {number} of the sample message is left out"
        return table + offset

    def _target(self, at: int) -> int:
        """What a reference at `at` points to."""
        target: int = at + unpack_from("<I", self._template, at)[0]
        return target
