"""The embedded store in a child process that is killed.

The child prints one line per step: `try`, then the same numbers as `done` when the call has returned. A line that was
printed happened before the kill; the parent reads the pipe to its end.

    python -m tests.soak.embedded DIRECTORY FIRST_NUMBER SEED
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

from tests.interop.server import ROOT
from tests.soak.ledger import CONFIRMED, SETTLED, SETTLING, TRIED, Label, Ledger

import basaltmq
from basaltmq.errors import DamagedFrameError

QUEUE = "jobs"
TOPIC = "events"
QUEUE_PLACE = "embedded|jobs"
TOPIC_PLACE = "embedded|events"
VISIBILITY_MS = 3_000
WAIT_S = 60.0


def work(path: str, first: int, seed: int) -> None:
    """Workload of the child until it is killed."""
    chance = random.Random(seed)
    number = first
    with basaltmq.open(path) as db:
        jobs = db.queue(QUEUE, visibility_timeout_ms=VISIBILITY_MS)
        events = db.topic(TOPIC, partitions=1)
        tell("ready")
        while True:
            labels = [Label("e", number + at) for at in range(chance.choice((1, 5, 40)))]
            number += len(labels)
            numbers = " ".join(str(label.number) for label in labels)
            tell(f"try {numbers}")
            jobs.enqueue([label.body(chance.choice((0, 500, 20_000))) for label in labels])
            tell(f"queued {numbers}")
            events.append([label.body(100) for label in labels], partition=0)
            tell(f"appended {numbers}")
            held = jobs.lease(chance.choice((1, 20, 60)))
            if held and chance.random() < 0.8:
                taken = " ".join(str(Label.of(message.payload).number) for message in held)
                tell(f"acking {taken}")
                jobs.ack(held)
                tell(f"acked {taken}")
            time.sleep(chance.choice((0.0, 0.01, 0.05)))


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class EmbeddedChild:
    """The child of one round."""

    def __init__(self, path: Path, ledger: Ledger, number: int, seed: int) -> None:
        self._ledger = ledger
        first = ledger.next_number("e")
        output = path.parent / f"embedded-{number}.out"
        self._output = output
        with open(output, "wb") as lines, open(path.parent / "embedded.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.embedded", str(path), str(first), str(seed)],
                stdout=lines,
                stderr=log,
                cwd=ROOT,
            )

    def kill(self) -> None:
        """Kill the child, and record its lines."""
        if self._process.poll() is not None:
            self._ledger.problem(f"the embedded child ended by itself with {self._process.returncode}; see its log")
        self._process.kill()
        self._process.wait(WAIT_S)
        said = self._output.read_bytes()
        for line in said[: said.rfind(b"\n") + 1].decode().splitlines():
            self._note(*line.split())
        self._output.unlink()

    def _note(self, what: str, *numbers: str) -> None:
        labels = [Label("e", int(number)) for number in numbers]
        ledger = self._ledger
        if what == "try":
            ledger.reached("e", labels[-1].number + 1)
            ledger.mark((QUEUE_PLACE, TOPIC_PLACE), labels, TRIED)
        elif what == "queued":
            ledger.mark((QUEUE_PLACE,), labels, CONFIRMED)
        elif what == "appended":
            ledger.mark((TOPIC_PLACE,), labels, CONFIRMED)
        elif what == "acking":
            for label in labels:
                ledger.seen(QUEUE_PLACE, label, "embedded")
            ledger.mark((QUEUE_PLACE,), labels, SETTLING)
        elif what == "acked":
            ledger.mark((QUEUE_PLACE,), labels, SETTLED)


def drain(path: Path, timeout_s: float) -> tuple[list[Label], list[tuple[int, Label]]]:
    """Return messages of the queue, and records of the topic with their offsets."""
    messages: list[Label] = []
    until_s = time.monotonic() + timeout_s
    with basaltmq.open(path) as db:
        # With the settings that it has: a repair may have restored it with default settings.
        jobs = db.queue(QUEUE)
        quiet_until_s = time.monotonic() + VISIBILITY_MS / 1000 + 1.0
        while time.monotonic() < quiet_until_s:
            assert time.monotonic() < until_s, f"{QUEUE_PLACE} does not become empty: {len(messages)} messages came"
            held = jobs.lease(1000, wait=0.2, visibility_ms=600_000)
            messages += [Label.of(message.payload) for message in held]
            if held:
                jobs.ack(held)
        topic = db.topic(TOPIC, partitions=1)
        records: list[tuple[int, Label]] = []
        offset: int | None = 0
        while offset is not None:
            try:
                # Records before an error stay in the list.
                records.extend((record.offset, Label.of(record.value or b"")) for record in topic.read(0, offset))
                offset = None
            except DamagedFrameError as error:
                offset = error.last_offset + 1
    return messages, records


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
