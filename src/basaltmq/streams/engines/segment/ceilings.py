"""Ceilings of offsets: upper bounds of the assigned offsets, which survive a loss of the log's end.

A killed process leaves an index on disk that lacks the latest frames. If their bytes are lost too, nothing in the log
or the index shows their offsets, and new records would get them again. So before a shard assigns an offset at or above
its ceiling, the engine records a higher one in ENDS, outside the log (`log/ends.py`):

    append ─ offset below the ceiling ─> nothing: one comparison
           └ otherwise ─> ENDS, through a memory map: 1 us

A ceiling is a block of offsets above the next one: as many as the shard has, between BLOCK_MIN and BLOCK_MAX. After a
loss, the shard continues at its ceiling (`lost_offsets`), and the skipped offsets are reported. Without a loss the log
shows the next offset, so a crash leaves no gap. A clean close removes all ceilings, because the index on disk is
complete then. Only shards that were written since have one: idle shards cost nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from basaltmq.log.ends import EndsFile, read_ceilings
from basaltmq.store.api import Reader
from basaltmq.store.families import Family
from basaltmq.store.keys import streams as stream_keys
from basaltmq.streams.adapter import no_offsets_left
from basaltmq.streams.engines.segment.state import SegmentShard
from basaltmq.streams.shards import OFFSET_MAX, ShardMeta

BLOCK_MIN: Final = 1024
BLOCK_MAX: Final = 65_536
"""Offsets per block. Larger blocks leave larger gaps after a loss; this one costs 0.02 ns per record."""

_log: Final = logging.getLogger(__name__)


class Ceilings:
    """The ceilings of all shards of a segment engine."""

    def __init__(self, directory: Path) -> None:
        self.ends = EndsFile(directory, lambda fault: _log.warning("%s", fault))
        self._directory = directory
        self._is_synced = True

    def raise_above(self, shard: SegmentShard, last: int) -> None:
        """Record a ceiling above offset `last`. Call before an append, under the shard's lock."""
        if last >= OFFSET_MAX:
            raise no_offsets_left(shard.number)
        block = BLOCK_MIN if last < BLOCK_MIN else min(last, BLOCK_MAX)
        ceiling = min(last + 1 + block, OFFSET_MAX)
        self.ends.put(shard.number, ceiling)
        self._is_synced = False
        shard.ceiling = ceiling

    def found(self) -> dict[int, int]:
        """Return the ceilings that the previous writer left. Call before the first append."""
        return read_ceilings(self._directory)

    def sync(self) -> None:
        """Make new ceilings durable. Until then, a power loss may lose them."""
        if not self._is_synced:
            self._is_synced = True
            self.ends.sync()

    def on_close(self, kind: type[BaseException] | None, _error: object, _trace: object) -> None:
        """Close ENDS. Without an error the index on disk shows all offsets, so remove the ceilings."""
        self.ends.close(clear=kind is None)


def ceilings_of(store: Reader, directory: Path, lane: int) -> dict[int, int]:
    """Return the ceilings of a lane's shards in a store that need not be open for writing."""
    found = read_ceilings(directory)
    rows = store.get_many(Family.SHARDS, [stream_keys.shard_key(shard) for shard in found])
    return {
        shard: ceiling
        for (shard, ceiling), raw in zip(found.items(), rows, strict=True)
        if raw is not None and ShardMeta.decode(shard, raw).lane == lane
    }
