"""Transaction outcomes in the index: which frames are aborted or belong to an open transaction.

    'Q' shard | producer id | last offset -> empty: a frame of records in a transaction of this producer
    'M' shard | producer id | last offset -> u8: the marker that ends the producer's transaction, 1 if it committed

A producer has one transaction at a time. So the first later marker of its producer decides a frame, and a frame without
one belongs to an open transaction. Both rows follow from the frame alone, in any insertion order, because copies by
segment cleaning are out of order. The frame's entry also contains the producer id, so removing it removes the row.

A marker is written only after the decision is durable. So the transaction may be visible before the marker is synced.

Cost: one seek, about 8 us, for a frame in a transaction; none for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from basaltmq.store.api import Reader
from basaltmq.store.batch import Batch
from basaltmq.store.keys import parts as key_parts
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.engines.segment.index.rows import FAMILY, OF_TRANSACTIONS, Entry, transaction_row

_KIND_SHARD_BYTES: Final = 9
_KIND_SHARD_PRODUCER_BYTES: Final = 17


class Outcomes:
    """The transaction rows of one index."""

    def __init__(
        self, store: Reader, flush: Callable[[], None], entries: Callable[[int, int], Iterator[Entry]]
    ) -> None:
        """`flush` writes buffered rows. `entries` yields the frames of a shard from an offset on."""
        self._store = store
        self._flush = flush
        self._entries = entries
        self.is_used = any(next(store.scan(FAMILY, *key_parts.prefix_range(kind)), None) for kind in (b"Q", b"M"))
        """Whether any transaction row exists. Without one, no lookup is needed."""
        self.is_buffered = False
        """Whether some rows are buffered."""

    def noted(self) -> None:
        """Record that a row is buffered."""
        self.is_used = self.is_buffered = True

    def put(self, batch: Batch, shard: int, entry: Entry) -> None:
        """Add a frame's row to `batch`, if it has one."""
        if entry.flags & OF_TRANSACTIONS:
            batch.put(FAMILY, *transaction_row(shard, entry.last_offset, entry.tag_mask, entry.flags))
            self.is_used = True

    def delete(self, batch: Batch, shard: int, entry: Entry) -> None:
        """Add to `batch` the deletion of a frame's row."""
        if entry.flags & OF_TRANSACTIONS:
            batch.delete(FAMILY, transaction_row(shard, entry.last_offset, entry.tag_mask, entry.flags)[0])

    def is_hidden(self, shard: int, entry: Entry) -> bool:
        """Whether a transactional frame is aborted or undecided."""
        marker = self.marker(shard, entry.tag_mask, entry.last_offset)
        return marker is None or not marker[1]

    def is_aborted(self, shard: int, entry: Entry) -> bool:
        marker = self.marker(shard, entry.tag_mask, entry.last_offset)
        return marker is not None and not marker[1]

    def aborted_records(self, shard: int) -> int:
        """Return how many records of aborted transactions a shard still has."""
        if not self.is_used:
            return 0
        self._written()
        records = 0
        prefix = stream_keys.stream_index_key(b"Q", shard, 0, 0)[:_KIND_SHARD_BYTES]
        for key, _ in self._store.scan(FAMILY, *key_parts.prefix_range(prefix)):
            entry = next(self._entries(shard, stream_keys.decode_stream_index_key(key)[3]), None)
            if entry is not None and self.is_aborted(shard, entry):
                records += entry.records
        return records

    def marker(self, shard: int, producer_id: int, offset: int) -> tuple[int, bool] | None:
        """Return (offset, is committed) of the producer's first marker at or after an offset, or None."""
        self._written()
        first = stream_keys.stream_index_key(b"M", shard, producer_id, offset)
        row = next(self._store.scan(FAMILY, first, key_parts.prefix_range(first[:_KIND_SHARD_PRODUCER_BYTES])[1]), None)
        return None if row is None else (stream_keys.decode_stream_index_key(row[0])[3], row[1] == b"\1")

    def is_needed(self, shard: int, marker: Entry) -> bool:
        """Whether a frame is left that a marker may decide."""
        self._written()
        start = stream_keys.stream_index_key(b"Q", shard, marker.tag_mask, 0)
        end = stream_keys.stream_index_key(b"Q", shard, marker.tag_mask, marker.last_offset)
        return next(self._store.scan(FAMILY, start, end), None) is not None

    def undecided(self, shard: int) -> dict[int, int]:
        """Return the first offset of each open transaction of a shard, by producer id."""
        if not self.is_used:
            return {}
        self._written()
        found = {producer_id: next(self._entries(shard, last), None) for producer_id, last in self._firsts(shard)}
        return {producer_id: entry.base_offset for producer_id, entry in found.items() if entry is not None}

    def _firsts(self, shard: int) -> Iterator[tuple[int, int]]:
        """Yield (producer id, last offset of its first undecided frame). Three seeks per producer."""
        at = stream_keys.stream_index_key(b"Q", shard, 0, 0)
        end = key_parts.prefix_range(at[:_KIND_SHARD_BYTES])[1]
        while (row := next(self._store.scan(FAMILY, at, end), None)) is not None:
            producer_id = stream_keys.decode_stream_index_key(row[0])[2]
            _, following = key_parts.prefix_range(row[0][:_KIND_SHARD_PRODUCER_BYTES])
            start = stream_keys.stream_index_key(b"Q", shard, producer_id, self._last_marker(shard, producer_id) + 1)
            first = next(self._store.scan(FAMILY, start, following), None)
            if first is not None:
                yield producer_id, stream_keys.decode_stream_index_key(first[0])[3]
            assert following is not None, "the prefix starts with a letter, so it has an end key"
            at = following

    def shards(self) -> Iterator[int]:
        """Yield every shard with transactional frames. One seek per shard."""
        self._written()
        at, end = key_parts.prefix_range(b"Q")
        while (row := next(self._store.scan(FAMILY, at, end), None)) is not None:
            yield stream_keys.decode_stream_index_key(row[0])[1]
            _, following = key_parts.prefix_range(row[0][:_KIND_SHARD_BYTES])
            assert following is not None, "the prefix starts with a letter, so it has an end key"
            at = following

    def _last_marker(self, shard: int, producer_id: int) -> int:
        start = stream_keys.stream_index_key(b"M", shard, producer_id, 0)
        end = key_parts.prefix_range(start[:_KIND_SHARD_PRODUCER_BYTES])[1]
        row = next(self._store.scan(FAMILY, start, end, reverse=True), None)
        return -1 if row is None else stream_keys.decode_stream_index_key(row[0])[3]

    def _written(self) -> None:
        if self.is_buffered:
            self._flush()
