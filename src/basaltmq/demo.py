"""What `make run` starts: a store on disk that writes and reads messages durably in front of the user's eyes.

It uses the store alone, as an embedded program would: batches, group commit, scans. Run again it finds what it left,
and says so. The rows are kept in the `default` family, which no part of Basalt uses, so that nothing else in the store
ever meets them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from basaltmq.errors import BasaltError
from basaltmq.store.batch import Batch
from basaltmq.store.commit import GroupCommit
from basaltmq.store.families import Family
from basaltmq.store.keys import message_key, message_prefix, prefix_range
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore

FAMILY: Final = Family.DEFAULT
QUEUE: Final = "basalt-demo"
PRODUCERS: Final = 64
MESSAGES: Final = 20_000
MESSAGES_MAX: Final = 10_000_000
"""A slip of the finger should not fill the disk."""

TELL_EVERY_S: Final = 1.0
TAKEN_PER_BATCH: Final = 500
VALUE: Final = b"a message of the Basalt demo".ljust(256, b".")

Say = Callable[[str], None]
INTERRUPTED: Final = 130


class Producers:
    """Publish from many coroutines at once, each waiting until its message is durable."""

    def __init__(self, group: GroupCommit, say: Say) -> None:
        self._group = group
        self._say = say
        self.confirmed = 0

    async def publish(self, count: int) -> None:
        even, rest = divmod(count, PRODUCERS)
        telling = asyncio.ensure_future(self._tell())
        try:
            await asyncio.gather(*(self._producer(even + (1 if number < rest else 0)) for number in range(PRODUCERS)))
        finally:
            telling.cancel()

    async def _producer(self, count: int) -> None:
        for _ in range(count):
            batch = Batch()
            batch.put(FAMILY, message_key(QUEUE, "", time.time_ns(), os.urandom(16)), VALUE)
            await self._group.commit_async(batch)
            self.confirmed += 1

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self._say(f"  ...        {self.confirmed:,} confirmed so far")


def count_messages(store: RocksStore) -> int:
    return sum(1 for _ in store.scan(FAMILY, *prefix_range(message_prefix(QUEUE))))


def consume(store: RocksStore, group: GroupCommit, count: int) -> int:
    """Take the oldest messages off the queue, durably; how many there were."""
    taken = 0
    batch = Batch()
    for key, _ in store.scan(FAMILY, *prefix_range(message_prefix(QUEUE))):
        if taken == count:
            break
        batch.delete(FAMILY, key)
        taken += 1
        if len(batch) == TAKEN_PER_BATCH:
            group.commit(batch)
            batch = Batch()
    if len(batch):
        group.commit(batch)
    return taken


def run(data_dir: Path, messages: int, say: Say) -> None:
    store = open_store(data_dir)
    try:
        say(f"Basalt demo: a store on RocksDB in {data_dir.resolve()}")
        found = count_messages(store)
        say(
            f"  found      {found:,} messages of an earlier run"
            if found
            else "  found      nothing: this is the first run"
        )
        group = GroupCommit(store)
        try:
            producers = Producers(group, say)
            started = time.perf_counter()
            try:
                asyncio.run(producers.publish(messages))
            except KeyboardInterrupt:
                say(f"Stopped after {producers.confirmed:,} confirmed messages; every one of them is in the store.")
                raise
            spent_s = time.perf_counter() - started
            say(f"  published  {messages:,} messages, each durable before it was confirmed: {_rate(messages, spent_s)}")
            started = time.perf_counter()
            taken = consume(store, group, (found + messages) // 2)
            say(f"  consumed   {taken:,} of them, oldest first: {_rate(taken, time.perf_counter() - started)}")
        finally:
            group.close()
        say(f"  left       {count_messages(store):,} messages, {store.size_bytes() / (1 << 20):.1f} MiB")
    finally:
        store.close()
    say("Try next: run it again and it finds them; kill it half way with kill -9, and what it confirmed is there.")


def _rate(count: int, spent_s: float) -> str:
    return f"{count / spent_s:,.0f} per second" if spent_s > 0 else "at once"


def _count(text: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 1 <= count <= MESSAGES_MAX:
        raise argparse.ArgumentTypeError(f"{count} is not between 1 and {MESSAGES_MAX}")
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m basaltmq.demo", description="Write and read messages durably in a Basalt store on disk."
    )
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="where the store is kept (default: data)")
    parser.add_argument("--messages", type=_count, default=MESSAGES, help=f"how many to publish (default: {MESSAGES})")
    chosen = parser.parse_args(arguments)
    try:
        run(chosen.data_dir, chosen.messages, lambda line: print(line, flush=True))  # noqa: T201
    except BasaltError as error:
        print(f"basalt: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
