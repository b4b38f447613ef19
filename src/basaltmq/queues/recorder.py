"""Records lifecycle events beside the queues, at a small part of what an operation costs, and never in its way.

A queue hands over the messages of one call; they become one block of bytes (lifecycle.py) with a copy of each message's
key and no object per event. Blocks of a change that is not written are never told. Blocks wait here, up to a limit in
bytes, until somebody takes them away; what comes when the room is used up is dropped and counted. Sampling is by
message id: of a message that is chosen all events are told, of the others none.

Noting happens under the plane's lock; taking, from any one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from basaltmq.errors import InvalidConfigError
from basaltmq.queues import rows
from basaltmq.queues.change import Change
from basaltmq.queues.lifecycle import PRIORITIES, BlockEncoder, Kind, encode_block
from basaltmq.queues.message import LAYOUT
from basaltmq.queues.plain import Plain

if TYPE_CHECKING:
    from basaltmq.queues.queue import Queue

WAITING_BYTES_MAX: Final = 16 << 20
"""Blocks that wait: half a million events, some seconds of a busy plane."""

FLUSH_BYTES: Final = 512 << 10
"""From here on somebody should come and take them: what an append costs is spread over some ten thousand events."""

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
        self._blocks: list[bytes] = []
        self._counts: list[int] = []
        """Events of each block."""
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
        if isinstance(messages, Plain):
            if messages.keys:
                self._note_plain(change, kind, messages, consumer)
            return
        if self._cut is not None:
            cut = self._cut
            messages = [each for each in messages if each.key[-2:] < cut]
            keys = None
        if not messages:
            return
        if keys is None:
            keys = [each.key for each in messages]
        block = encode_block(
            kind,
            PRIORITIES if queue.config.priorities_max else 0,
            change.now_ns,
            consumer,
            keys,
            # In a queue where nothing ever failed there is nothing to look for.
            _attempts(messages) if tried and queue.stats.failed else b"",
        )
        change.after(partial(self._add, block, len(messages)))

    def _note_plain(self, change: Change, kind: Kind, plain: Plain, consumer: str) -> None:
        """The same of columns: no queue with priorities has them, and none of them failed before."""
        keys = plain.keys
        if len(keys) == 1 and self._cut is None:
            block = self._encoder.encode_one(kind, change.now_ns, consumer, keys[0])
            change.after(partial(self._add, block, 1))
            return
        if self._cut is not None:
            cut = self._cut
            keys = [key for key in keys if key[-2:] < cut]
            if not keys:
                return
        head = keys[0][:-_ID_BYTES]
        # They are in order: what the first and the last have in common, all have.
        if len(keys) == len(plain.keys) and keys[-1].startswith(head):
            block = self._encoder.encode_alike(kind, change.now_ns, consumer, head, plain.id_bytes())
        else:
            block = encode_block(kind, 0, change.now_ns, consumer, keys)
        change.after(partial(self._add, block, len(keys)))

    def take(self) -> tuple[list[bytes], int]:
        """Everything that waits, and how many events that are."""
        # Each step is whole for other threads: what comes meanwhile comes behind these. Counts are added first.
        count = len(self._blocks)
        blocks, counts = self._blocks[:count], self._counts[:count]
        del self._blocks[:count], self._counts[:count]
        self._taken_bytes += sum(map(len, blocks))
        return blocks, sum(counts)

    def _add(self, block: bytes, events: int) -> None:
        before = self._added_bytes - self._taken_bytes
        after = before + len(block)
        if after > self._waiting_bytes_max:
            self.dropped += events
            return
        self._counts.append(events)
        self._blocks.append(block)
        self._added_bytes += len(block)
        self.recorded += events
        if before == 0:
            self._on_first()
        elif before < FLUSH_BYTES <= after:
            self._on_full()


def _attempts(messages: Sequence[Placed]) -> bytes:
    """The column of attempts; empty if nobody failed before."""
    heads = b"".join([each.row[:_HEAD_BYTES] for each in messages])
    if heads[::_HEAD_BYTES].count(LAYOUT) == len(messages):
        if not any(heads[at::_HEAD_BYTES].strip(b"\0") for at in range(2, _HEAD_BYTES)):
            return b""
        return b"".join([heads[at + 2 : at + _HEAD_BYTES] for at in range(0, len(heads), _HEAD_BYTES)])
    column = b"".join([rows.attempts_of(each.row).to_bytes(4, "big") for each in messages])
    return column if column.strip(b"\0") else b""
