"""Persistent row of a transactional id.

    | version u8 | state u8 | producer id i64 | epoch i16 | previous epoch i16 | timeout ms u32 | began ms i64 |
    | changed ms i64 | shards u32 | groups u32 | shard u64 * | (length u16, name) * |
    | firsts u32 | (shard u64, offset u64) * |

Version 2 ends with the first offsets of the last committed transaction, by shard; version 1 has none. They allow lost
commit markers to be written again. States and their numbers are Kafka's:

    EMPTY ──> ONGOING ──> PREPARE_COMMIT ──> COMPLETE_COMMIT ──> ONGOING ...
                     └──> PREPARE_ABORT ───> COMPLETE_ABORT ───> ONGOING ...

A PREPARE state is the decision. It is durable before the first control batch, and never reversed.
"""

from __future__ import annotations

import enum
from struct import Struct as Layout
from struct import error as struct_error
from struct import pack, unpack_from
from typing import Final

import msgspec

from basaltmq.errors import CorruptionError

ROW_VERSION: Final = 1
ROW_VERSION_COMMITTED: Final = 2
"""The version of a row with first offsets of a committed transaction."""
NO_EPOCH: Final = -1
EPOCH_MAX: Final = (1 << 15) - 1

_HEAD: Final = Layout(">BBqhhIqqII")
_NAME: Final = Layout(">H")
_COUNT: Final = Layout(">I")
_FIRST: Final = Layout(">QQ")


class State(enum.IntEnum):
    """State of a transactional id."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5

    @property
    def label(self) -> str:
        """Kafka's name of the state."""
        return self.name.title().replace("_", "")

    @property
    def is_decided(self) -> bool:
        """Whether the transaction is decided and its control batches are not all written."""
        return self in {State.PREPARE_COMMIT, State.PREPARE_ABORT}


class Transaction(msgspec.Struct, frozen=True):
    """State of one transactional id."""

    id: str
    producer_id: int
    epoch: int = NO_EPOCH
    previous_epoch: int = NO_EPOCH
    """Epoch that a client may still send with InitProducerId if the last response was lost."""
    state: State = State.EMPTY
    timeout_ms: int = 0
    began_ms: int = -1
    changed_ms: int = 0
    shards: frozenset[int] = frozenset()
    groups: frozenset[str] = frozenset()
    committed: tuple[tuple[int, int], ...] = ()
    """Shards with the first offsets of the last transaction, if it was decided to commit."""

    def encode(self) -> bytes:
        shards = sorted(self.shards)
        head = _HEAD.pack(
            ROW_VERSION_COMMITTED if self.committed else ROW_VERSION,
            self.state,
            self.producer_id,
            self.epoch,
            self.previous_epoch,
            self.timeout_ms,
            self.began_ms,
            self.changed_ms,
            len(shards),
            len(self.groups),
        )
        names = (name.encode() for name in sorted(self.groups))
        firsts = b"".join(_FIRST.pack(*each) for each in self.committed)
        if firsts:
            firsts = _COUNT.pack(len(self.committed)) + firsts
        listed = b"".join(_NAME.pack(len(name)) + name for name in names)
        return head + pack(f">{len(shards)}Q", *shards) + listed + firsts

    @classmethod
    def decode(cls, transactional_id: str, raw: bytes) -> Transaction:
        try:
            version, state, pid, epoch, before, timeout_ms, began, changed, shards, groups = _HEAD.unpack_from(raw)
            if version not in (ROW_VERSION, ROW_VERSION_COMMITTED):
                known = f"{ROW_VERSION} and {ROW_VERSION_COMMITTED}"
                raise CorruptionError(f"a transaction row has version {version}; this release reads {known}")
            at = _HEAD.size
            numbers = unpack_from(f">{shards}Q", raw, at)
            at += 8 * shards
            names = []
            for _ in range(groups):
                begin = at + _NAME.size
                at = begin + _NAME.unpack_from(raw, at)[0]
                names.append(raw[begin:at].decode())
            committed: tuple[tuple[int, int], ...] = ()
            if version == ROW_VERSION_COMMITTED:
                (count,) = _COUNT.unpack_from(raw, at)
                begin = at + _COUNT.size
                at = begin + _FIRST.size * max(1, count)
                committed = tuple(_FIRST.iter_unpack(raw[begin:at]))
            if at != len(raw):
                raise CorruptionError(f"the row of transaction {transactional_id!r} has {len(raw)} bytes, not {at}")
            return cls(
                transactional_id,
                pid,
                epoch,
                before,
                State(state),
                timeout_ms,
                began,
                changed,
                frozenset(numbers),
                frozenset(names),
                committed,
            )
        except (ValueError, struct_error) as error:
            raise CorruptionError(f"the row of transaction {transactional_id!r} cannot be read: {error}") from error
