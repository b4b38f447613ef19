"""How transactions ended, as the index knows it from the log: which frames are aborted, which are not decided.

    'Q' shard | producer id | last offset -> empty: a frame of records that belongs to a transaction of this producer
    'M' shard | producer id | last offset -> u8: the marker that ends the producer's transaction, 1 if it committed

A producer has one transaction at a time, so the fate of a frame is that of the first marker of its producer behind it,
and a frame without one is not decided. Both rows follow from the frame alone, in whatever order frames are met: copies
made by cleaning lie out of order. The frame's entry has the producer too, and so takes its row along when it goes.

A marker is written only when the decision is durable: what it decides may be shown before the marker itself is synced.

Budget: one seek, some 8 us, for a frame that belongs to a transaction; nothing for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.keys import queues as keys
from basaltmq.streams.engines.segment.index.rows import FAMILY, OF_TRANSACTIONS, Entry, transaction_row

_KIND_SHARD_BYTES: Final = 9
_KIND_SHARD_PRODUCER_BYTES: Final = 17


class Outcomes:
    """The rows of one index."""

    def __init__(
        self, store: Reader, flush: Callable[[], None], entries: Callable[[int, int], Iterator[Entry]]
    ) -> None:
        """`flush` writes the rows of frames that are gathered; `entries` gives those of a shard from an offset on."""
        self._store = store
        self._flush = flush
        self._entries = entries
        self.is_used = any(next(store.scan(FAMILY, *keys.prefix_range(kind)), None) for kind in (b"Q", b"M"))
        """Is there any such row? Without one nobody need look."""
        self.is_gathered = False
        """Are some not written yet?"""

    def noted(self) -> None:
        """A row is gathered."""
        self.is_used = self.is_gathered = True

    def put(self, batch: Batch, shard: int, entry: Entry) -> None:
        """Add a frame's row to `batch`, if it has one."""
        if entry.flags & OF_TRANSACTIONS:
            batch.put(FAMILY, *transaction_row(shard, entry.last_offset, entry.tag_mask, entry.flags))
            self.is_used = True

    def delete(self, batch: Batch, shard: int, entry: Entry) -> None:
        """Add to `batch` that a frame's row goes."""
        if entry.flags & OF_TRANSACTIONS:
            batch.delete(FAMILY, transaction_row(shard, entry.last_offset, entry.tag_mask, entry.flags)[0])

    def is_hidden(self, shard: int, entry: Entry) -> bool:
        """Was a frame of a transaction aborted, or is it not decided?"""
        marker = self.marker(shard, entry.tag_mask, entry.last_offset)
        return marker is None or not marker[1]

    def is_aborted(self, shard: int, entry: Entry) -> bool:
        marker = self.marker(shard, entry.tag_mask, entry.last_offset)
        return marker is not None and not marker[1]

    def marker(self, shard: int, producer_id: int, offset: int) -> tuple[int, bool] | None:
        """(offset, was it committed) of the first marker of a producer at or behind an offset."""
        self._written()
        first = keys.stream_index_key(b"M", shard, producer_id, offset)
        row = next(self._store.scan(FAMILY, first, keys.prefix_range(first[:_KIND_SHARD_PRODUCER_BYTES])[1]), None)
        return None if row is None else (keys.decode_stream_index_key(row[0])[3], row[1] == b"\1")

    def is_needed(self, shard: int, marker: Entry) -> bool:
        """Is there a frame left whose fate a marker may be?"""
        self._written()
        start = keys.stream_index_key(b"Q", shard, marker.tag_mask, 0)
        end = keys.stream_index_key(b"Q", shard, marker.tag_mask, marker.last_offset)
        return next(self._store.scan(FAMILY, start, end), None) is not None

    def undecided(self, shard: int) -> dict[int, int]:
        """Where the transactions of a shard begin that are not decided, by producer."""
        if not self.is_used:
            return {}
        self._written()
        found = {producer_id: next(self._entries(shard, last), None) for producer_id, last in self._firsts(shard)}
        return {producer_id: entry.base_offset for producer_id, entry in found.items() if entry is not None}

    def _firsts(self, shard: int) -> Iterator[tuple[int, int]]:
        """(producer id, last offset of its first frame that is not decided): three seeks for each producer."""
        at = keys.stream_index_key(b"Q", shard, 0, 0)
        end = keys.prefix_range(at[:_KIND_SHARD_BYTES])[1]
        while (row := next(self._store.scan(FAMILY, at, end), None)) is not None:
            producer_id = keys.decode_stream_index_key(row[0])[2]
            _, following = keys.prefix_range(row[0][:_KIND_SHARD_PRODUCER_BYTES])
            start = keys.stream_index_key(b"Q", shard, producer_id, self._last_marker(shard, producer_id) + 1)
            first = next(self._store.scan(FAMILY, start, following), None)
            if first is not None:
                yield producer_id, keys.decode_stream_index_key(first[0])[3]
            assert following is not None, "a key that begins with a letter has one behind it"
            at = following

    def shards(self) -> Iterator[int]:
        """Every shard that has frames of transactions: a seek for each."""
        self._written()
        at, end = keys.prefix_range(b"Q")
        while (row := next(self._store.scan(FAMILY, at, end), None)) is not None:
            yield keys.decode_stream_index_key(row[0])[1]
            _, following = keys.prefix_range(row[0][:_KIND_SHARD_BYTES])
            assert following is not None, "a key that begins with a letter has one behind it"
            at = following

    def _last_marker(self, shard: int, producer_id: int) -> int:
        start = keys.stream_index_key(b"M", shard, producer_id, 0)
        end = keys.prefix_range(start[:_KIND_SHARD_PRODUCER_BYTES])[1]
        row = next(self._store.scan(FAMILY, start, end, reverse=True), None)
        return -1 if row is None else keys.decode_stream_index_key(row[0])[3]

    def _written(self) -> None:
        if self.is_gathered:
            self._flush()
