"""Operations that were gathered for a turn of the loop, and their division into batches.

Publishes and enqueues share the limits of a batch. If both are gathered, each gets half of the bytes, so neither delays
the other for longer than a turn.

A row change remembers how many publishes were gathered before it. It is written in the batch of the last of them, never
earlier. So a row that records a publish (the packet identifier of MQTT QoS 2) is on disk exactly if the message is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from operator import itemgetter
from typing import Final

from basaltmq.broker.message.operations import Enqueue, Publish, RowChange, Settlement

BATCH_MESSAGES_MAX: Final = 5000
BATCH_BYTES_MAX: Final = 32 << 20
"""Larger turns are written as several batches, so that none exceeds the store's limit."""

TURN_BYTES_MAX: Final = 2 << 20
"""Bodies written per turn, or one larger message. RocksDB holds the GIL for 2 to 4 ms per megabyte, and for up to 15 ms
if other programs use the processors."""


class Gathered:
    """Publishes, enqueues, settlements and row changes, each in the order of arrival."""

    __slots__ = ("enqueue_bytes", "enqueues", "publishes", "rows", "settlements")

    def __init__(
        self,
        publishes: list[Publish] | None = None,
        enqueues: list[Enqueue] | None = None,
        settlements: list[Settlement] | None = None,
        rows: list[tuple[int, RowChange]] | None = None,
    ) -> None:
        self.publishes = publishes or []
        self.enqueues = enqueues or []
        self.settlements = settlements or []
        self.rows = rows or []
        """Row changes, each with the number of publishes before it."""
        self.enqueue_bytes = sum([each.size_bytes for each in enqueues]) if enqueues else 0

    def __bool__(self) -> bool:
        return bool(self.publishes or self.settlements or self.enqueues or self.rows)

    def add_enqueue(self, call: Enqueue) -> None:
        self.enqueues.append(call)
        self.enqueue_bytes += call.size_bytes

    def add_rows(self, change: RowChange) -> None:
        self.rows.append((len(self.publishes), change))

    def has_only_enqueues(self) -> bool:
        return bool(self.enqueues) and not self.publishes and not self.settlements and not self.rows

    def size_bytes(self) -> int:
        """Return the size of all bodies."""
        return sum(_body_sizes(self.publishes)) + self.enqueue_bytes

    def take(self, bytes_max: int) -> tuple[Gathered, int]:
        """Remove one batch: all settlements, and the first messages up to the limits. Return it and its size in bytes.

        At least one publish and one enqueue are taken, of any size. Row changes follow the publishes before them.
        """
        if self.publishes and self.enqueues:
            bytes_max //= 2
        size_bytes = 0
        publishes, enqueues = self.publishes, self.enqueues
        if publishes:
            sizes = _body_sizes(publishes)
            size_bytes = sum(sizes)
            self.publishes = []
            if size_bytes > bytes_max or len(publishes) > BATCH_MESSAGES_MAX:
                fitting = min(_fitting(sizes, bytes_max), BATCH_MESSAGES_MAX)
                size_bytes = sum(sizes[:fitting])
                publishes, self.publishes = publishes[:fitting], publishes[fitting:]
        if enqueues:
            sizes = [each.size_bytes for each in enqueues]
            counts = [len(each.drafts) for each in enqueues]
            fitting = min(_fitting(sizes, bytes_max), _fitting(counts, BATCH_MESSAGES_MAX))
            enqueues, self.enqueues = enqueues[:fitting], enqueues[fitting:]
        settlements, self.settlements = self.settlements, []
        rows, self.rows = _split_rows(self.rows, len(publishes))
        taken = Gathered(publishes, enqueues, settlements, rows)
        self.enqueue_bytes -= taken.enqueue_bytes
        return taken, size_bytes + taken.enqueue_bytes

    def put_back(self, parts: Iterable[Gathered]) -> None:
        """Insert parts before everything else, in their order. They were taken before and not written."""
        parts = list(parts)
        rows: list[tuple[int, RowChange]] = []
        before = 0
        for part in [*parts, self]:
            rows += [(before + position, change) for position, change in part.rows]
            before += len(part.publishes)
        self.rows = rows
        self.publishes = [each for part in parts for each in part.publishes] + self.publishes
        self.enqueues = [each for part in parts for each in part.enqueues] + self.enqueues
        self.enqueue_bytes = sum([each.size_bytes for each in self.enqueues])
        self.settlements = [each for part in parts for each in part.settlements] + self.settlements

    def halves(self) -> tuple[Gathered, Gathered] | None:
        """Split the operations. Return None if there is only one, which cannot be split. Row changes stay with the
        publishes before them."""
        settlements, rows = self.settlements, self.rows
        if len(settlements) == 1 and len(settlements[0].ids) > 1 and not (self.publishes or self.enqueues or rows):
            whole = settlements[0]
            middle = len(whole.ids) // 2
            settlements = [whole._replace(ids=whole.ids[:middle]), whole._replace(ids=whole.ids[middle:])]
        counts = [len(self.publishes) or len(rows), len(self.enqueues), len(settlements)]
        if sum(counts) == 1:
            return None
        if max(counts) < sum(counts):
            # Separate the kinds first.
            if self.publishes or rows:
                return Gathered(self.publishes, rows=rows), Gathered(None, self.enqueues, settlements)
            return Gathered(None, self.enqueues), Gathered(None, None, settlements)
        middle = sum(counts) // 2
        head, tail = _split_rows(rows, middle) if self.publishes else (rows[:middle], rows[middle:])
        return (
            Gathered(self.publishes[:middle], self.enqueues[:middle], settlements[:middle], head),
            Gathered(self.publishes[middle:], self.enqueues[middle:], settlements[middle:], tail),
        )


def _split_rows(
    rows: list[tuple[int, RowChange]], publishes: int
) -> tuple[list[tuple[int, RowChange]], list[tuple[int, RowChange]]]:
    """Split row changes after a number of publishes. The positions of the second part count from there."""
    fitting = bisect_right(rows, publishes, key=itemgetter(0))
    return rows[:fitting], [(position - publishes, change) for position, change in rows[fitting:]]


def _body_sizes(publishes: list[Publish]) -> list[int]:
    return [len(each[4]) for each in publishes]


def _fitting(sizes: list[int], limit: int) -> int:
    """Return how many of the first items fit the limit, at least one."""
    if sum(sizes) <= limit:
        return len(sizes)
    return max(1, bisect_right(list(accumulate(sizes)), limit))
