"""Records lifecycle events in memory with low overhead and without blocking queue operations.

A queue passes the messages of one call. Messages usually arrived in one call. Then the recorder keeps the first key and
the concatenated ids, and encodes the block (`event.py`) when it is taken. For others it encodes the block at once.
There is no object per event. Events of a change that is not written are never published. Events wait here up to a limit
in bytes; further ones are dropped and counted. Sampling is by message id: either all events of a message are recorded,
or none.

`note` runs under the plane's lock. `take` may run in any one thread.

Cost: a note takes 1 us with warm caches, for any number of messages. Encoding a block takes 0.6 us in the taking
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from basaltmq.errors import InvalidConfigError
from basaltmq.ids import ID_BYTES
from basaltmq.queues.change import Change
from basaltmq.queues.entries import rows
from basaltmq.queues.entries.plain import Plain
from basaltmq.queues.events.event import PRIORITIES, BlockEncoder, Kind, encode_block
from basaltmq.queues.message import LAYOUT

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

WAITING_BYTES_MAX: Final = 16 << 20
"""Limit of waiting events: about half a million, some seconds of a busy plane."""

FLUSH_BYTES: Final = 1 << 20
"""Above this size the writer is notified, so that an append covers some ten thousand events. Every wake-up costs both
threads a wait for the GIL."""

NOTE_BYTES: Final = 150
"""Memory of a note besides its bytes: list slots, a number and object headers."""

_NOTE: Final = 5
"""Slots of a note: kind, time, consumer, key, ids. Kind 0: number of events, no consumer, an encoded block."""

_HEAD_BYTES: Final = 6
"""Size of layout, priority and attempts at the start of a message's row."""

_SAMPLE_STEPS: Final = 1 << 16


class KeyedMessage(Protocol):
    """A message with a key and a row: a queue entry or a delivery."""

    @property
    def key(self) -> bytes: ...

    @property
    def row(self) -> bytes: ...


class Listener(Protocol):
    """Receives message events. Called under the plane's lock; it must neither block nor fail."""

    def note(
        self,
        change: Change,
        kind: Kind,
        queue: Queue,
        messages: Sequence[KeyedMessage],
        consumer: str = "",
        *,
        keys: list[bytes] | None = None,
        tried: bool = False,
    ) -> None:
        """Record messages of one call. `keys` are all their keys, if the caller has the list. `tried`: their rows are
        in memory and contain attempts."""
        ...


class NoListener:
    """Discards all events."""

    def note(self, *_: object, **__: object) -> None:
        return


class Recorder:
    """Collects the events of a plane."""

    def __init__(
        self,
        *,
        sample: float = 1.0,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        on_first: Callable[[], None] = lambda: None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_first` is called when the first event waits, `on_full` when many wait."""
        if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 < sample <= 1:
            raise InvalidConfigError(f"the share of sampled events must be above 0 and at most 1, not {sample!r:.80}")
        steps = max(1, round(sample * _SAMPLE_STEPS))
        self._cut = None if steps == _SAMPLE_STEPS else steps.to_bytes(2, "big")
        self._waiting_bytes_max = waiting_bytes_max
        self._on_first = on_first
        self._on_full = on_full
        self._encoder = BlockEncoder()
        self._notes: list[Any] = []
        """All notes in one flat list, without an object per note."""
        self._added_bytes = 0
        self._taken_bytes = 0
        self.recorded = 0
        """Events recorded and not dropped here."""
        self.dropped = 0
        """Events dropped because of the limit."""

    @property
    def waiting_bytes(self) -> int:
        return self._added_bytes - self._taken_bytes

    def note(
        self,
        change: Change,
        kind: Kind,
        queue: Queue,
        messages: Sequence[KeyedMessage],
        consumer: str = "",
        *,
        keys: list[bytes] | None = None,
        tried: bool = False,
    ) -> None:
        """Record messages, to be published when the change is written."""
        if type(messages) is Plain:
            # Columns exist only in queues without priorities, and their messages have no failed attempts.
            keys = messages.keys
            if self._cut is not None:
                cut = self._cut
                keys = [key for key in keys if key[-2:] < cut]
                if keys:
                    self._note_block(change, kind, 0, consumer, keys)
            elif len(keys) == 1:
                self._note(change, kind, change.now_ns, consumer, keys[0], b"")
            # Keys are ordered, so a prefix of the first and the last is a prefix of all.
            elif keys and keys[-1].startswith(keys[0][:-ID_BYTES]):
                self._note(change, kind, change.now_ns, consumer, keys[0], messages.id_bytes())
            elif keys:
                self._note_block(change, kind, 0, consumer, keys)
            return
        if self._cut is not None:
            cut = self._cut
            messages = [each for each in messages if each.key[-2:] < cut]
            keys = None
        if not messages:
            return
        if keys is None:
            keys = [each.key for each in messages]
        flags = PRIORITIES if queue.config.priorities_max else 0
        # A queue without failures has no attempts to read.
        attempts = _attempts(messages) if tried and queue.stats.failed else b""
        self._note_block(change, kind, flags, consumer, keys, attempts)

    def _note_block(
        self, change: Change, kind: Kind, flags: int, consumer: str, keys: list[bytes], attempts: bytes = b""
    ) -> None:
        """Record messages of which only the keys are copied."""
        block = encode_block(kind, flags, change.now_ns, consumer, keys, attempts)
        self._note(change, 0, len(keys), "", block, b"")

    def _note(self, change: Change, kind: int, at_ns: int, consumer: str, key: bytes, ids: bytes) -> None:
        if change.events is None:
            change.events = [kind, at_ns, consumer, key, ids]
            change.publish_events = self._add
        else:
            change.events.extend((kind, at_ns, consumer, key, ids))

    def take(self) -> tuple[list[bytes], int]:
        """Return the encoded blocks of all waiting events, and the number of events."""
        # Each step is atomic for other threads. New notes are appended after these.
        count = len(self._notes)
        notes = self._notes[:count]
        del self._notes[:count]
        encoder = self._encoder
        blocks: list[bytes] = []
        events = taken_bytes = 0
        each = iter(notes)
        for kind, at_ns, consumer, key, ids in zip(each, each, each, each, each, strict=True):
            taken_bytes += len(key) + len(ids)
            if ids:
                blocks.append(encoder.encode_alike(kind, at_ns, consumer, key[:-ID_BYTES], ids))
                events += len(ids) // ID_BYTES
            elif kind:
                blocks.append(encoder.encode_one(kind, at_ns, consumer, key))
                events += 1
            else:
                blocks.append(key)
                events += at_ns
        self._taken_bytes += taken_bytes + NOTE_BYTES * (count // _NOTE)
        return blocks, events

    def _add(self, notes: list[Any]) -> None:
        """Add the notes of a written change."""
        size_bytes = NOTE_BYTES + len(notes[3]) + len(notes[4])
        events = _events_of(notes[0], notes[1], notes[4])
        if len(notes) > _NOTE:
            size_bytes = NOTE_BYTES * (len(notes) // _NOTE) + sum(map(len, notes[3::5])) + sum(map(len, notes[4::5]))
            events = sum(map(_events_of, notes[0::5], notes[1::5], notes[4::5]))
        before = self._added_bytes - self._taken_bytes
        after = before + size_bytes
        if after > self._waiting_bytes_max:
            self.dropped += events
            return
        self._notes += notes
        self._added_bytes += size_bytes
        self.recorded += events
        if before == 0:
            self._on_first()
        elif before < FLUSH_BYTES <= after:
            self._on_full()


def _events_of(kind: int, at_ns: int, ids: bytes) -> int:
    """Return the number of events of a note."""
    return at_ns if kind == 0 else len(ids) // ID_BYTES or 1


def _attempts(messages: Sequence[KeyedMessage]) -> bytes:
    """Return the column of attempts; empty if there are none."""
    heads = b"".join([each.row[:_HEAD_BYTES] for each in messages])
    if heads[::_HEAD_BYTES].count(LAYOUT) == len(messages):
        if not any(heads[at::_HEAD_BYTES].strip(b"\0") for at in range(2, _HEAD_BYTES)):
            return b""
        return b"".join([heads[at + 2 : at + _HEAD_BYTES] for at in range(0, len(heads), _HEAD_BYTES)])
    column = b"".join([rows.attempts_of(each.row).to_bytes(4, "big") for each in messages])
    return column if column.strip(b"\0") else b""
