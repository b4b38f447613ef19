"""The program of `basalt demo`: opens a store on disk, publishes messages to a topic, and consumes them.

It is an ordinary embedded program. Later runs find the messages of earlier ones. The topic stays in the store, so that
the `basalt` command can inspect it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import basaltmq
from basaltmq.embedded.database import Basalt
from basaltmq.embedded.topic import EmbeddedTopic
from basaltmq.errors import BasaltError

TOPIC: Final = "demo"
GROUP: Final = "demo-readers"
PARTITIONS: Final = 4
PRODUCERS: Final = 4
BATCH: Final = 100
MESSAGES: Final = 200_000
MESSAGES_MAX: Final = 10_000_000
"""Limit that prevents a typing error from filling the disk."""

REPORT_EVERY_S: Final = 1.0
VALUE: Final = b"a message of the Basalt demo".ljust(256, b".")

Say = Callable[[str], None]
INTERRUPTED: Final = 130


class Producers:
    """Threads that append batches and wait until each is durable."""

    def __init__(self, topic: EmbeddedTopic, say: Say) -> None:
        self._topic = topic
        self._say = say
        self._left = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BasaltError | None = None
        self.confirmed = 0

    def publish(self, count: int) -> None:
        self._left = count
        threads = [threading.Thread(target=self._produce, args=(number,)) for number in range(PRODUCERS)]
        for thread in threads:
            thread.start()
        try:
            reported = time.monotonic()
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.05)
                if not threads[0].is_alive():
                    threads = threads[1:] or threads
                if time.monotonic() - reported >= REPORT_EVERY_S:
                    reported = time.monotonic()
                    self._say(f"  ...        {self.confirmed:,} confirmed so far")
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _produce(self, number: int) -> None:
        while not self._stop.is_set():
            with self._lock:
                take = min(BATCH, self._left)
                self._left -= take
            if not take:
                return
            try:
                self._topic.append([VALUE] * take, partition=number % PARTITIONS)
            except BasaltError as error:
                self._failure = error
                self._stop.set()
                return
            with self._lock:
                self.confirmed += take


def count_messages(db: Basalt) -> int:
    topic = db.topic(TOPIC, partitions=PARTITIONS)
    return sum(topic.info(partition).records for partition in range(PARTITIONS))


def run(data_dir: Path, messages: int, say: Say) -> None:
    with basaltmq.open(data_dir) as db:
        say(f"Basalt demo: a topic in a store in {data_dir.resolve()}")
        found = count_messages(db)
        say(f"  found      {found:,} messages of earlier runs" if found else "  found      nothing: the first run")
        topic = db.topic(TOPIC)
        producers = Producers(topic, say)
        started = time.perf_counter()
        try:
            producers.publish(messages)
        except KeyboardInterrupt:
            say(f"Stopped after {producers.confirmed:,} confirmed messages; all of them are in the store.")
            raise
        spent_s = time.perf_counter() - started
        say(f"  published  {messages:,} messages of 256 bytes, confirmed when durable: {_rate(messages, spent_s)}")
        started = time.perf_counter()
        with topic.consume(GROUP, wait=0) as consumer:
            read = sum(1 for _ in consumer)
        say(f"  consumed   {read:,} as group {GROUP}: {_rate(read, time.perf_counter() - started)}")
        lag = sum(each.lag for each in topic.lag(GROUP))
        say(f"  kept       {count_messages(db):,} messages, lag of the group {lag:,}")
    say("Try next:")
    say(f"  basalt --data-dir {data_dir} topic list")
    say(f"  basalt --data-dir {data_dir} topic read {TOPIC} --partition 0 --limit 3")
    say(f"  basalt --data-dir {data_dir} topic groups {GROUP}")
    say(f"  basalt --data-dir {data_dir} store verify")
    say("  Run the demo again and kill it with kill -9: all confirmed messages are in the store.")


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
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="directory of the store (default: data)")
    parser.add_argument(
        "--messages", type=_count, default=MESSAGES, help=f"number of messages to publish (default: {MESSAGES})"
    )
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
