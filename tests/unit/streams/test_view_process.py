"""A view next to a real writer process that is killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from tests.unit.streams.ring_child import CONFIRMED, TOPIC
from tests.unit.streams.view_child import SEGMENT_BYTES, TOPICS
from tests.unit.streams.view_rig import Writer, values

from basaltmq.errors import TopicNotFoundError
from basaltmq.log.committed import read_mark
from basaltmq.streams.view import StreamView

CONFIRMED_PER_LIFE = 400
LIVES = 2


class Child:
    """One run of the writer, and the records it has confirmed."""

    def __init__(self, path: Path) -> None:
        self.confirmed: dict[str, dict[int, bytes]] = defaultdict(dict)
        self.enough = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.streams.view_child", str(path)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = line.split()
            if not line.endswith(b"\n"):
                break
            self.confirmed[words[0].decode()][int(words[1])] = words[2]
            if sum(map(len, self.confirmed.values())) >= CONFIRMED_PER_LIFE:
                self.enough.set()
        self.enough.set()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        status = self._process.wait(30)
        self._reader.join(30)
        assert not self._reader.is_alive(), "some confirmed records were not read"
        assert status == -signal.SIGKILL, f"the writer exited with status {status}; see its stderr"
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.mark.promise("P1")
@pytest.mark.promise("P3")
def test_all_confirmed_records_are_visible_in_order_through_kills_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    seen: dict[str, list[bytes]] = {topic: [] for topic in TOPICS}
    confirmed: dict[str, dict[int, bytes]] = {topic: {} for topic in TOPICS}
    view: StreamView | None = None
    try:
        for _ in range(LIVES):
            child = Child(path)
            try:
                while not child.enough.wait(0.02):
                    if view is None and (path / "log" / "0000" / "COMMITTED").exists():
                        view = StreamView.open(path)
                    if view is not None:
                        view.wait(0.05)
                        for topic in TOPICS:
                            read_on(view, topic, seen[topic])
            finally:
                child.kill()
            assert sum(map(len, child.confirmed.values())) >= CONFIRMED_PER_LIFE, "the writer exited unexpectedly"
            for topic in TOPICS:
                confirmed[topic].update(child.confirmed[topic])
            view = view or StreamView.open(path)
            # A confirmed batch may be only in the ring. Views see it after recovery has moved it to its segment.
            Writer(path, segment_bytes=SEGMENT_BYTES).close()
            view.refresh()
            with StreamView.open(path) as fresh:
                for topic in TOPICS:
                    read_on(view, topic, seen[topic])
                    again: list[bytes] = []
                    read_on(fresh, topic, again)
                    assert again == seen[topic]
                    assert fresh.info(topic, 0) == view.info(topic, 0)
            for topic in TOPICS:
                require_confirmed(path, view, topic, seen[topic], confirmed[topic])
            assert view.info("churn", 0).records <= 40
    finally:
        if view is not None:
            view.close()


@pytest.mark.promise("P1")
def test_a_batch_only_in_the_ring_at_a_kill_is_visible_after_the_next_open(tmp_path: Path) -> None:
    path = tmp_path / "data"
    child = subprocess.run(
        [sys.executable, "-m", "tests.unit.streams.ring_child", str(path)],
        capture_output=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    base = int(child.stdout)
    with StreamView.open(path) as view:
        assert len(values(view, TOPIC)) == base
        Writer(path, segment_bytes=SEGMENT_BYTES).close()
        view.refresh()
        assert values(view, TOPIC)[base:] == list(CONFIRMED)


def require_confirmed(
    path: Path, view: StreamView, topic: str, shown: list[bytes], confirmed: dict[int, bytes]
) -> None:
    """Assert that every confirmed offset is visible with its value. A failure lists the details."""
    missing = sorted(offset for offset in confirmed if offset >= len(shown))
    changed = sorted(offset for offset, value in confirmed.items() if offset < len(shown) and shown[offset] != value)
    if missing or changed:
        files = sorted(f"{file.relative_to(path)} {file.stat().st_size}" for file in path.rglob("*") if file.is_file())
        print(f"kept directory: {path}", *files, sep="\n")
        marks = [f"{lane.name}: {read_mark(lane)}" for lane in sorted((path / "log").iterdir())]
        raise AssertionError(
            f"topic {topic}: confirmed offsets are missing: {missing}, or have another value: {changed}; confirmed up "
            f"to {max(confirmed)}, the view ends at {len(shown)} with {view.info(topic, 0)}; marks {marks}; see {path}"
        )


def read_on(view: StreamView, topic: str, shown: list[bytes]) -> None:
    """Read the new records. Offsets have no gaps and never change their value."""
    while True:
        try:
            batch = view.read(topic, 0, len(shown))
        except TopicNotFoundError:
            assert not shown, f"{topic} was visible and is missing now"
            return
        records = batch.records()
        assert [record.offset for record in records] == list(range(len(shown), len(shown) + len(records)))
        shown += [(record.value or b"") for record in records]
        if not records:
            return
