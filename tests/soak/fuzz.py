"""Fuzz of damage: a file of a stopped store is damaged; the store is opened, verified, repaired and reopened.

    python -m tests.soak.fuzz [--cases 200] [--seed N] [--first CASE] [--folder DIRECTORY]

The open may be refused with a BasaltError that names a file. A case fails after any other exception, after CASE_S
seconds, if a confirmed message is lost without a report, or if an acknowledged one returns without a report. A case
depends only on the seed and its number. Cases run in a child process, because a fault in native code ends it.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
from tests.interop.server import ROOT
from tests.soak.census import Census
from tests.soak.corruption import KINDS, harm
from tests.soak.ledger import Label
from tests.soak.report import Report

import basaltmq
from basaltmq.embedded.database import Basalt, Settings
from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.errors import BasaltError
from basaltmq.log.lane import Lane
from basaltmq.log.ring import SLOT_BYTES
from basaltmq.log.verify import verify_log
from basaltmq.pipeline.audit.store import audit_rows
from basaltmq.pipeline.findings import Severity
from basaltmq.queues.draft import Draft
from basaltmq.store.directory import LOG
from basaltmq.store.repair import repair
from basaltmq.store.salvage.verify import verify
from basaltmq.streams.engines.segment.engine import SegmentEngine
from basaltmq.streams.shards import Engine
from basaltmq.streams.view import StreamView

QUEUES: Final = ("plain", "large", "late", "left", "right")
STEPS: Final = 4
TOPICS: Final = {"frames": "segment", "rows": "rocksdb"}
PARTITIONS: Final = 2
IDLE: Final = "idle"
"""A topic that gets its last record before the log's last segments start."""
RING_WAIT_S: Final = 60
STATES: Final = ("closed", "killed")
EARLIER: Final = "earlier"
"""Directory with the files before the last step."""
WAYS: Final = ("flip", "truncate", "remove", "zero", "flips", "swap", "cut in two", "older", "duplicate")
FLIPS: Final = 20
CASE_S: Final = 60
"""Timeout of one case. Most take less than a second."""

HOUR_MS: Final = 3_600_000
QUIET: Final = Settings(maintenance_interval_s=3600.0)


def build(folder: Path, seed: int, size: int = 40) -> None:
    """A closed store, and a copy as SIGKILL would leave it."""
    chance = random.Random(seed)
    with basaltmq.open(folder / "closed", settings=QUIET) as db:
        for name in QUEUES:
            db.queue(name)
        for name, engine in TOPICS.items():
            db.topic(name, engine=engine, partitions=PARTITIONS)
        db.topic(IDLE, engine="segment")
        segments = db.streams.engines.get(Engine.SEGMENT)
        assert isinstance(segments, SegmentEngine)
        for step in range(STEPS):
            _fill(db, chance, step, size)
            if step == 1:
                for at in range(size):
                    db.topic(IDLE).append([Label(IDLE, at).body(100)])
            if step < 2:
                db.store.flush()
                segments.checkpoint()
                segments.lanes[0].log.roll()
            if step == STEPS - 2:
                db.store.sync()
                shutil.copytree(folder / "closed", folder / EARLIER)
        _use_ring(db, segments.lanes[0].log)
        db.store.sync()
        shutil.copytree(folder / "closed", folder / "killed")


def _use_ring(db: Basalt, lane: Lane) -> None:
    """Append until the ring has frames."""
    deadline = time.monotonic() + RING_WAIT_S
    batches = 0
    while lane._ring is None or lane._ring.used_bytes < 10 * SLOT_BYTES:
        assert time.monotonic() < deadline, "a lane with frequent syncs does not use a ring"
        db.topic("frames").append([Label("busy", batches).body(100)], partition=0)
        batches += 1


def _fill(db: Basalt, chance: random.Random, step: int, size: int) -> None:
    def bodies(name: str, count: int, most: int) -> tuple[bytes, ...]:
        first = step * count
        return tuple(Label(name, first + at).body(chance.randint(0, most)) for at in range(count))

    db.queue("plain").enqueue(bodies("plain", 4 * size, 300))
    db.queue("large").enqueue(bodies("large", size // 4, 60_000))
    db.queue("late").enqueue([Draft(payload=body, delay_ms=HOUR_MS) for body in bodies("late", size, 100)])
    for body in bodies("both", size // 4, 9_000):
        db.queue_plane.publish(["left", "right"], body)
    for name in ("plain", "left"):
        leased = db.queue(name).lease(size // 2)
        db.queue(name).ack(leased[::2])
    for name in TOPICS:
        for partition in range(PARTITIONS):
            db.topic(name).append(list(bodies(f"{name}-{partition}", size, 2_000)), partition=partition)


def _spare_name(file: Path) -> str:
    """Return a name for a copy of a file with the next number, if files of its kind are numbered."""
    stem, _, end = file.name.rpartition(".")
    if stem.isdecimal():
        return f"{int(stem) + 8:0{len(stem)}d}.{end}"
    head, _, number = file.name.rpartition("-")
    if number.isdecimal():
        return f"{head}-{int(number) + 8:0{len(number)}d}"
    return f"{file.name}.copy"


class Case:
    """One case. `fault` is empty if it passed."""

    def __init__(self, number: int, seed: int, folder: Path) -> None:
        self.chance = random.Random(f"{seed}.{number}")
        self.state = self.chance.choice(STATES)
        self._earlier = folder / EARLIER
        self.path = folder / f"case-{number}"
        shutil.copytree(folder / self.state, self.path)
        self.census = Census.take(self.path)
        self.done = self._damage()
        self.report = Report(self.done.split()[-1])

    def _damage(self) -> str:
        kinds = [kind for kind in KINDS.values() if self._files(kind.pattern)]
        kind = self.chance.choice(kinds)
        files = self._files(kind.pattern)
        file = self.chance.choice(files)
        way = self.chance.choice(WAYS)
        if way == "swap" and len(files) > 1:
            other = self.chance.choice([each for each in files if each != file])
            one, two = file.read_bytes(), other.read_bytes()
            file.write_bytes(two)
            other.write_bytes(one)
        elif way == "cut in two":
            # Remove bytes in the middle.
            raw = file.read_bytes()
            begin = self.chance.randrange(len(raw))
            file.write_bytes(raw[:begin] + raw[begin + self.chance.randint(1, 4096) :])
        elif way == "older" and self._older(file) is not None:
            shutil.copyfile(self._earlier / file.relative_to(self.path), file)
        elif way == "duplicate":
            shutil.copyfile(file, file.with_name(_spare_name(file)))
        elif way == "flips":
            for _ in range(FLIPS):
                harm(file, "flip", self.chance)
        else:
            harm(file, "flip" if way in ("swap", "older") else way, self.chance)
        return f"{self.state}, {way} {kind.name} {file.name}"

    def _older(self, file: Path) -> Path | None:
        """Return the previous version of the file, if it has changed."""
        if not file.is_relative_to(self.path):
            return None
        older = self._earlier / file.relative_to(self.path)
        return older if older.is_file() and older.read_bytes() != file.read_bytes() else None

    def _files(self, pattern: str) -> list[Path]:
        return sorted(each for each in self.path.glob(pattern) if each.is_file() and each.stat().st_size)

    def run(self) -> str:
        """Return the fault; empty if there is none."""
        first = self._try_open()
        self.report.text += "\n".join([*verify(self.path), *verify_log(self.path / LOG)])
        outcome = repair(self.path, reconcile=reconcile_planes)
        self.report.losses += [{**msgspec.to_builtins(loss), "what": loss.line()} for loss in outcome.losses]
        if outcome.remaining:
            return f"the repair leaves {outcome.remaining[0]}"
        if left := verify(self.path):
            return f"verify after the repair: {left[0]}"
        again = repair(self.path, reconcile=reconcile_planes)
        if again.done or again.losses:
            return f"a second repair is not idle: {[*again.done, *again.losses][0]}"
        after = self._drain()
        self.report.add_unreadable(self.path)
        unnamed = self._missing(after)
        if unnamed:
            return (
                f"missing and not named: {len(unnamed)}, such as {unnamed[0]}; the first open: {first or 'went well'}"
            )
        return self._audit()

    def _try_open(self) -> str:
        """Open the damaged store like a program would: it is refused, or serves."""
        try:
            with basaltmq.open(self.path, create=False, settings=QUIET) as db:
                for queue in db.queues():
                    queue.peek(10)
                return ""
        except BasaltError as error:
            return str(error)

    def _drain(self) -> Census:
        with basaltmq.open(self.path, create=False, settings=QUIET) as db:
            there = {queue.name for queue in db.queues()}
            for name in there:
                db.queue(name, create=False).enqueue(b"probe")
        return Census.take(self.path)

    def _missing(self, after: Census) -> list[str]:
        found = []
        for label, rows in self.census.messages.items():
            there = {(held.queue, held.id) for held in after.messages.get(label, ())}
            found += [
                f"{label} of queue {held.queue}, id {held.id}"
                for held in rows
                if (held.queue, held.id) not in there and not self.report.names_message(held)
            ]
        for at, record in self.census.records.items():
            if at not in after.records and not self.report.names_record(record, self.census):
                found.append(f"{at[2]} of topic {at[0]}[{at[1]}], offset {record.offset}")
        if not self.report.losses:
            for label, rows in after.messages.items():
                known = {(held.queue, held.id) for held in self.census.messages.get(label, ())}
                found += [f"{label} came back" for held in rows if (held.queue, held.id) not in known]
        return found

    def _audit(self) -> str:
        with StreamView.open(self.path) as view:
            for finding in audit_rows(self.path, view):
                if finding.severity is not Severity.NOTE and not self.report.text:
                    return f"audit: {finding.kind} of {finding.subject}: {finding.detail}"
        return ""


class _Heard(logging.Handler):
    """Add log lines to the report."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.report = Report("")

    def emit(self, record: logging.LogRecord) -> None:
        self.report.text += f"{record.getMessage()}\n"


def _too_long(_: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"the case takes longer than {CASE_S} s")


def run_cases(folder: Path, seed: int, first: int, count: int) -> list[str]:
    """Run cases. Return a line for each failed one, whose damaged copy is kept."""
    faults = []
    heard = _Heard()
    logging.getLogger("basaltmq").addHandler(heard)
    signal.signal(signal.SIGALRM, _too_long)
    for number in range(first, first + count):
        signal.alarm(CASE_S)
        done = ""
        try:
            case = Case(number, seed, folder)
            done = case.done
            heard.report = case.report
            print(f"case {number}: {done}", flush=True)
            fault = case.run()
        except Exception:
            fault = traceback.format_exc()[-3000:]
        finally:
            signal.alarm(0)
        if fault:
            faults.append(f"case {number} ({done}): {fault}")
            print(f"FAULT {faults[-1]}", flush=True)
        else:
            shutil.rmtree(folder / f"case-{number}", ignore_errors=True)
    return faults


def run_apart(folder: Path, seed: int, first: int, count: int) -> str:
    """Run cases in a child process. Return the lines of failed cases, or how the process ended."""
    command = [sys.executable, "-m", "tests.soak.fuzz", "--seed", str(seed), "--first", str(first)]
    child = subprocess.run(
        [*command, "--cases", str(count), "--folder", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=CASE_S * count,
        check=False,
        cwd=ROOT,
    )
    said = child.stdout.decode(errors="replace")
    return said[-6000:] if child.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description="Damage stores and repair them.")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--folder", type=Path, help="where to work; damaged copies of failed cases stay there")
    given = parser.parse_args()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="basalt-fuzz-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fuzz: seed {given.seed}, {given.cases} cases, in {folder}", flush=True)
    if not (folder / "closed").exists():
        build(folder, given.seed)
    faults = run_cases(folder, given.seed, given.first, given.cases)
    print(f"{given.cases} cases, {len(faults)} failed", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
