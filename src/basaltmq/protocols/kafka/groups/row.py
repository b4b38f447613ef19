"""Persistent row of a KIP-848 consumer group, in addition to its committed offsets.

    | version u8 | epoch i32 | session ms i32 | heartbeat ms i32 |        -1: config not set

A nonzero epoch marks a KIP-848 group. After a restart, epochs continue from it, so that no member's old epoch is valid
again. Epoch 0 is a group that only has configs. Members are not persistent: after a restart they rejoin and continue
from the committed offsets. The broker does not wait for the row's fsync.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import Final, NamedTuple

from basaltmq.errors import CorruptionError

ROW_VERSION: Final = 1
NOT_SET: Final = -1

_ROW: Final = Layout(">Biii")


class GroupRow(NamedTuple):
    """The row of one group."""

    epoch: int = 0
    session_ms: int = NOT_SET
    heartbeat_ms: int = NOT_SET

    @property
    def has_settings(self) -> bool:
        return self.session_ms != NOT_SET or self.heartbeat_ms != NOT_SET

    def encode(self) -> bytes:
        return _ROW.pack(ROW_VERSION, *self)

    @classmethod
    def decode(cls, raw: bytes) -> GroupRow:
        if len(raw) != _ROW.size:
            raise CorruptionError(f"a consumer group row has {len(raw)} bytes, not {_ROW.size}")
        version, *fields = _ROW.unpack(raw)
        if version != ROW_VERSION:
            raise CorruptionError(f"a consumer group row has version {version}; this release reads {ROW_VERSION}")
        return cls(*fields)
