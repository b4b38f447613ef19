"""Records lifecycle events beside the queues, at a small part of what an operation costs, and never in its way.

A queue hands over the messages of one call. Of those that came in one call, which is most, the first key and the ids
in one piece are kept as they are, and become a block of bytes (lifecycle.py) when somebody takes them away; of others
the block is made at once. Either way there is no object per event. Notes of a change that is not written are never
told. Notes wait here, up to a limit in bytes; what comes when the room is used up is dropped and counted. Sampling is
by message id: of a message that is chosen all events are told, of the others none.

Noting happens under the plane's lock; taking, from any one thread.

Budget: a note costs its caller 1 us where caches are warm, whatever the number of messages; a block, 0.6 us of whoever
takes it, who makes many at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from basaltmq.errors import InvalidConfigError
from basaltmq.queues.change import Change
from basaltmq.queues.events.event import PRIORITIES, BlockEncoder, Kind, encode_block
from basaltmq.queues.message import LAYOUT
from basaltmq.queues.ready import rows
from basaltmq.queues.ready.plain import Plain

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

WAITING_BYTES_MAX: Final = 16 << 20
"""Notes that wait: half a million events, some seconds of a busy plane."""

FLUSH_BYTES: Final = 1 << 20
"""From here on somebody should come and take them: what an append costs is spread over some ten thousand events. Each
time a thread has to wait for the interpreter, which costs both it and the one it waits for."""

NOTE_BYTES: Final = 150
"""What a note takes beside the bytes it keeps: its places in a list, a number, and what objects are made of."""

_NOTE: Final = 5
"""Places of a note: kind, moment, consumer, key, ids. Kind 0: how many events, nobody, a block that is made."""

_HEAD_BYTES: Final = 6
"""Layout, priority and attempts at the beginning of a message's row."""

_ID_BYTES: Final = 16
_SAMPLE_STEPS: Final = 1 << 16


class Placed(Protocol):
    """A message in the machinery's hands: an entry of a queue, a delivery."""

    @property
    def key(self) -> bytes: ...

    @property
    def row(self) -> bytes: ...


class Listener(Protocol):
    """Who is told what happens to messages. Called under the plane's lock; it must neither wait nor fail."""

    def note(
        self,
        change: Change,
        kind: Kind,
        queue: Queue,
        messages: Sequence[Placed],
        consumer: str = "",
        *,
        keys: list[bytes] | None = None,
        tried: bool = False,
    ) -> None:
        """Messages of one call. `keys`: those of all of them, where the caller has the list. `tried`: their rows are
        in memory, and tell attempts."""
        ...


class Silence:
    """Nobody is told."""

    def note(
        self,
        change: Change,
        kind: Kind,
        queue: Queue,
        messages: Sequence[Placed],
        consumer: str = "",
        *,
        keys: list[bytes] | None = None,
        tried: bool = False,
    ) -> None:
        return


class Recorder:
    """Where a plane's events go."""

    def __init__(
        self,
        *,
        sample: float = 1.0,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        on_first: Callable[[], None] = lambda: None,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_first` is called when something comes to wait where nothing did, `on_full` when much of it waits."""
        if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 < sample <= 1:
            raise InvalidConfigError(f"a share of events is more than 0 and up to 1, not {sample!r:.80}")
        steps = max(1, round(sample * _SAMPLE_STEPS))
        self._cut = None if steps == _SAMPLE_STEPS else steps.to_bytes(2, "big")
        self._waiting_bytes_max = waiting_bytes_max
        self._on_first = on_first
        self._on_full = on_full
        self._encoder = BlockEncoder()
        self._notes: list[Any] = []
        """All notes, one behind the other: no object is made for one."""
        self._added_bytes = 0
        self._taken_bytes = 0
        self.recorded = 0
        """Events that were noted and not dropped here."""
        self.dropped = 0
        """Events for which there was no room."""

    @property
    def waiting_bytes(self) -> int:
        return self._added_bytes - self._taken_bytes

    def note(
        self,
        change: Change,
        kind: Kind,
        queue: Queue,
        messages: Sequence[Placed],
        consumer: str = "",
        *,
        keys: list[bytes] | None = None,
        tried: bool = False,
    ) -> None:
        """Tell of messages when the change is written."""
        if type(messages) is Plain:
            # No queue with priorities has columns, and none of them failed before.
            keys = messages.keys
            if self._cut is not None:
                cut = self._cut
                keys = [key for key in keys if key[-2:] < cut]
                if keys:
                    self._note_block(change, kind, 0, consumer, keys)
            elif len(keys) == 1:
                self._note(change, kind, change.now_ns, consumer, keys[0], b"")
            # They are in order: what the first and the last have in common, all have.
            elif keys and keys[-1].startswith(keys[0][:-_ID_BYTES]):
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
        # In a queue where nothing ever failed there is nothing to look for.
        attempts = _attempts(messages) if tried and queue.stats.failed else b""
        self._note_block(change, kind, flags, consumer, keys, attempts)

    def _note_block(
        self, change: Change, kind: Kind, flags: int, consumer: str, keys: list[bytes], attempts: bytes = b""
    ) -> None:
        """Messages of which nothing but their keys is to be copied, which are let go."""
        block = encode_block(kind, flags, change.now_ns, consumer, keys, attempts)
        self._note(change, 0, len(keys), "", block, b"")

    def _note(self, change: Change, kind: int, at_ns: int, consumer: str, key: bytes, ids: bytes) -> None:
        if change.told is None:
            change.told = [kind, at_ns, consumer, key, ids]
            change.tell = self._add
        else:
            change.told.extend((kind, at_ns, consumer, key, ids))

    def take(self) -> tuple[list[bytes], int]:
        """The blocks of everything that waits, and how many events that are."""
        # Each step is whole for other threads: what comes meanwhile comes behind these.
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
                blocks.append(encoder.encode_alike(kind, at_ns, consumer, key[:-_ID_BYTES], ids))
                events += len(ids) // _ID_BYTES
            elif kind:
                blocks.append(encoder.encode_one(kind, at_ns, consumer, key))
                events += 1
            else:
                blocks.append(key)
                events += at_ns
        self._taken_bytes += taken_bytes + NOTE_BYTES * (count // _NOTE)
        return blocks, events

    def _add(self, notes: list[Any]) -> None:
        """Take the notes of a change, which is written."""
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
    """How many events a note is of."""
    return at_ns if kind == 0 else len(ids) // _ID_BYTES or 1


def _attempts(messages: Sequence[Placed]) -> bytes:
    """The column of attempts; empty if nobody failed before."""
    heads = b"".join([each.row[:_HEAD_BYTES] for each in messages])
    if heads[::_HEAD_BYTES].count(LAYOUT) == len(messages):
        if not any(heads[at::_HEAD_BYTES].strip(b"\0") for at in range(2, _HEAD_BYTES)):
            return b""
        return b"".join([heads[at + 2 : at + _HEAD_BYTES] for at in range(0, len(heads), _HEAD_BYTES)])
    column = b"".join([rows.attempts_of(each.row).to_bytes(4, "big") for each in messages])
    return column if column.strip(b"\0") else b""
