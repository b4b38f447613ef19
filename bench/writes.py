"""The cost of the store's layer: batched writes through the store compared with plain `rocksdict` (SPEC A1, promise
P2).

The same rows (16-byte keys, 256-byte values), the same options, batches of 100, the WAL on, no sync: once through
`Batch` and `RocksStore.write`, once straight into a `WriteBatch`. Each round opens two empty databases and writes to
them in turns, so that a change of the machine's speed affects both. The result is the median of the rounds.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.row import Row
from rocksdict import Rdict, WriteBatch

from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.options import StoreOptions, database_options, family_options

FAMILY: Final = Family.MESSAGES
VALUE_BYTES: Final = 256
BATCH: Final = 100
SLICE_BATCHES: Final = 50
SLICES: Final = 10
ROUNDS: Final = 7

RATE_RATIO_MIN: Final = 0.60

WriteRows = Callable[[Sequence[bytes], bytes], None]


def run(rounds: int = ROUNDS) -> list[Row]:
    raw_rates, our_rates = [], []
    for number in range(rounds):
        raw_rate, our_rate = _round(ours_first=number % 2 == 1)
        raw_rates.append(raw_rate)
        our_rates.append(our_rate)
    ratio = statistics.median(ours / raw for ours, raw in zip(our_rates, raw_rates, strict=True))
    return [
        Row("raw rocksdict", statistics.median(raw_rates), "rows/s"),
        Row("through the store", statistics.median(our_rates), "rows/s"),
        Row("store to raw", ratio, "x", f">= {RATE_RATIO_MIN}", ratio >= RATE_RATIO_MIN),
    ]


def _round(*, ours_first: bool) -> tuple[float, float]:
    """Return rows per second: `rocksdict`, and the store."""
    with tempfile.TemporaryDirectory(prefix="basalt-bench-") as folder:
        store = open_store(Path(folder) / "ours")
        options = StoreOptions()
        database = Rdict(str(Path(folder) / "raw"), database_options(options), family_options(options))
        handles = [database.get_column_family_handle(FAMILY.label)]

        def raw(keys: Sequence[bytes], value: bytes) -> None:
            native = WriteBatch(raw_mode=True)
            (handle,) = handles
            for key in keys:
                native.put(key, value, handle)
            database.write(native)

        def ours(keys: Sequence[bytes], value: bytes) -> None:
            batch = Batch()
            for key in keys:
                batch.put(FAMILY, key, value)
            store.write(batch)

        spent = {"raw": 0.0, "ours": 0.0}
        writers: list[tuple[str, WriteRows]] = [("raw", raw), ("ours", ours)]
        if ours_first:
            writers.reverse()
        for _ in range(SLICES):
            batches = [[os.urandom(16) for _ in range(BATCH)] for _ in range(SLICE_BATCHES)]
            value = os.urandom(VALUE_BYTES)
            for name, write in writers:
                started = time.perf_counter()
                for keys in batches:
                    write(keys, value)
                spent[name] += time.perf_counter() - started
        store.close()
        # The database stays open while a handle is held.
        handles.clear()
        database.close()
    rows = SLICES * SLICE_BATCHES * BATCH
    return rows / spent["raw"], rows / spent["ours"]
