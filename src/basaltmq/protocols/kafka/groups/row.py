"""What outlives the process of a consumer group, beside its offsets.

    | version u8 | epoch i32 | session ms i32 | heartbeat ms i32 |        a setting that was not set is -1

The epoch says that the group is one of the second protocol, and is where a later coordinator goes on counting, so that
nothing a member remembers can be mistaken for something of today; 0 is a group that only has settings. Members are not
kept: after a restart they are unknown, join again and go on from what was committed. The row is not waited for.
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
            raise CorruptionError(f"the row of a consumer group has {len(raw)} bytes, not {_ROW.size}")
        version, *fields = _ROW.unpack(raw)
        if version != ROW_VERSION:
            raise CorruptionError(f"the row of a consumer group has version {version}, this Basalt knows {ROW_VERSION}")
        return cls(*fields)
