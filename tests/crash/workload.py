"""Workload of a child on a store until it is killed, and the checks afterwards.

Every change of a writer is one batch over four families: the same token as a row of three of them, and the writer's
counter. A token is `{writer}{number}`, both u32; numbers of a writer only grow. Lines to the parent:

    rows ...      after open: the rows of each family, then `opened`
    ? n           a delete of a token, or of a range of them, starts
    + n           the token was confirmed          - n    the delete was confirmed
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from struct import Struct
from typing import Final

from tests.crash.harness import Child, Emit, listen_and_kill

from basaltmq.errors import StoreClosedError, StoreStalledError
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

TOKEN: Final = Struct(">II")
COUNTER: Final = Struct(">I")
FAMILIES: Final = (Family.MESSAGES, Family.LEASES, Family.STREAM_RECORDS)
THREADS: Final = 2
TASKS: Final = 3
KEPT: Final = 40
"""Tokens that a writer keeps, so that dumps are short."""


def run(emit: Emit, path: str, seed: int) -> None:
    """Open, dump, then write and manage in random order until killed, or for a few hundred operations."""
    rng = random.Random(seed)
    base = Path(path)
    store = open_store(base)
    dump(emit, store)
    _loosen(store)
    for _ in range(3):
        commits = GroupCommit(store)
        stop = threading.Event()
        workers = [
            threading.Thread(target=target, args=(emit, store, commits, stop, rng.getrandbits(32)))
            for target in (*[_writer] * THREADS, _loop)
        ]
        for worker in workers:
            worker.start()
        for _ in range(rng.randint(5, 30)):
            _manage(store, base, rng)
        stop.set()
        for worker in workers:
            worker.join()
        commits.close()
        store.close()
        store = open_store(base)
    store.close()


def dump(emit: Emit, store: RocksStore) -> None:
    """Report all tokens by family, and all counters."""
    for family in FAMILIES:
        emit(
            f"rows {family.label} "
            + " ".join(str(_number(key)) for key, value in store.scan(family) if _whole(key, value))
        )
    counters = (f"{COUNTER.unpack(key)[0]}:{COUNTER.unpack(value)[0]}" for key, value in store.scan(Family.STATE))
    emit("counters " + " ".join(counters))
    emit("opened")


def check(emit: Emit, path: str) -> None:
    """Open, dump and close cleanly."""
    store = open_store(Path(path), create=False)
    dump(emit, store)
    faults = store.verify()
    store.close()
    for fault in faults:
        emit(f"fault {fault}")


def _loosen(store: RocksStore) -> None:
    """Small memory tables, so that flushes and compactions happen within a round."""
    for family in FAMILIES:
        store.set_options({"write_buffer_size": "65536", "level0_file_num_compaction_trigger": "2"}, family)


def _manage(store: RocksStore, base: Path, rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.3:
        store.flush(rng.choice(FAMILIES))
    elif choice < 0.4:
        store.compact(rng.choice(FAMILIES))
    elif choice < 0.5:
        store.set_options({"write_buffer_size": str(rng.choice((65536, 131072)))}, rng.choice(FAMILIES))
    elif choice < 0.6:
        target = base.with_name(f"{base.name}-copy")
        shutil.rmtree(target, ignore_errors=True)
        store.checkpoint(target)
    else:
        threading.Event().wait(rng.random() * 0.004)


class _Tokens:
    """The numbers of one writer, and its batches."""

    def __init__(self, writer: int) -> None:
        self.writer = writer
        self.next = 1
        self.standing: list[int] = []

    def put(self, rng: random.Random) -> tuple[int, Batch]:
        number, self.next = self.next, self.next + 1
        key = TOKEN.pack(self.writer, number)
        batch = Batch()
        for family in FAMILIES:
            # Some values are large enough for a blob file.
            size = 5000 if family is Family.STREAM_RECORDS and rng.random() < 0.2 else 40
            batch.put(family, key, key * (size // len(key)))
        batch.put(Family.STATE, COUNTER.pack(self.writer), COUNTER.pack(number))
        return _number(key), batch

    def delete(self, rng: random.Random) -> tuple[list[int], Batch]:
        batch = Batch()
        if rng.random() < 0.5:
            gone = [self.standing.pop(rng.randrange(len(self.standing)))]
            for family in FAMILIES:
                batch.delete(family, gone[0].to_bytes(8, "big"))
        else:
            self.standing.sort()
            half = len(self.standing) // 2
            gone, self.standing = self.standing[:half], self.standing[half:]
            for family in FAMILIES:
                batch.delete_range(family, TOKEN.pack(self.writer, 0), (gone[-1] + 1).to_bytes(8, "big"))
        return gone, batch


def _writer(emit: Emit, store: RocksStore, commits: GroupCommit, stop: threading.Event, seed: int) -> None:
    rng = random.Random(seed)
    tokens = _Tokens(seed)
    while not stop.is_set():
        if len(tokens.standing) > KEPT:
            gone, batch = tokens.delete(rng)
            _say(emit, "?", gone)
            store.write(batch)
            commits.wait_durable()
            _say(emit, "-", gone)
        else:
            number, batch = tokens.put(rng)
            store.write(batch)
            commits.wait_durable()
            emit(f"+ {number}")
            tokens.standing.append(number)


def _loop(emit: Emit, store: RocksStore, commits: GroupCommit, stop: threading.Event, seed: int) -> None:
    rng = random.Random(seed)

    async def commit(batch: Batch) -> None:
        while True:
            try:
                store.write(batch, wait_ms=0)
                await commits.durable()
                return
            except StoreStalledError:
                await asyncio.sleep(0.001)

    async def task(tokens: _Tokens) -> None:
        while not stop.is_set():
            if len(tokens.standing) > KEPT:
                gone, batch = tokens.delete(rng)
                _say(emit, "?", gone)
                await commit(batch)
                _say(emit, "-", gone)
            else:
                number, batch = tokens.put(rng)
                await commit(batch)
                emit(f"+ {number}")
                tokens.standing.append(number)

    async def everybody() -> None:
        await asyncio.gather(*(task(_Tokens(rng.getrandbits(32))) for _ in range(TASKS)))

    try:
        asyncio.run(everybody())
    except StoreClosedError:
        # A commit requested at the end of the round is not confirmed.
        return


def _say(emit: Emit, sign: str, numbers: Iterable[int]) -> None:
    for number in numbers:
        emit(f"{sign} {number}")


def _number(key: bytes) -> int:
    return int.from_bytes(key, "big")


def _whole(key: bytes, value: bytes) -> bool:
    assert value == key * (len(value) // len(key)), f"the value of {key.hex()} is not what was written"
    return True


class Expectation:
    """Expected tokens: present, absent or unknown."""

    def __init__(self) -> None:
        self.present: set[int] = set()
        self.doubtful: set[int] = set()
        self.absent: set[int] = set()
        self.counters: dict[int, int] = {}
        self.checks = 0
        self._rows: dict[str, set[int]] = {}

    def receive_line(self, line: str) -> None:
        """Process a line of a child. Raises AssertionError for a lost, partially applied or restored token."""
        kind, _, rest = line.partition(" ")
        if kind == "+":
            number = int(rest)
            self.present.add(number)
            writer, count = divmod(number, 1 << 32)
            self.counters[writer] = max(count, self.counters.get(writer, 0))
        elif kind == "?":
            self.doubtful.add(int(rest))
        elif kind == "-":
            self.present.discard(int(rest))
            self.absent.add(int(rest))
        elif kind == "rows":
            label, _, numbers = rest.partition(" ")
            self._rows[label] = {int(number) for number in numbers.split()}
        elif kind == "counters":
            self._compare({int(a): int(b) for a, _, b in (pair.partition(":") for pair in rest.split())})
        else:
            assert kind in ("opened", "END"), line

    def _compare(self, counters: dict[int, int]) -> None:
        one, two, three = (self._rows.pop(family.label) for family in FAMILIES)
        assert one == two == three, f"partially applied: {sorted((one ^ two) | (one ^ three))[:5]}"
        lost = self.present - self.doubtful - one
        assert not lost, f"confirmed and lost: {sorted(lost)[:5]} of {len(lost)}"
        back = one & self.absent
        assert not back, f"deleted and restored: {sorted(back)[:5]} of {len(back)}"
        for number in one:
            writer, count = divmod(number, 1 << 32)
            assert counters.get(writer, 0) >= count, f"token {count} of writer {writer} without its counter"
        for writer, count in self.counters.items():
            assert counters.get(writer, 0) >= count, f"the counter of writer {writer} is behind what was confirmed"
        # The result of a recovery is final.
        self.absent |= (self.present | self.doubtful) - one
        self.present = one
        self.doubtful.clear()
        self.counters = counters
        self.checks += 1


def ride(child: Child, expectation: Expectation, rng: random.Random, *, early: bool) -> None:
    """Read the lines of a child and kill it at a random time: during recovery or work."""
    listen_and_kill(child, expectation.receive_line, rng, early=early, early_s=0.12, late_s=0.18)
