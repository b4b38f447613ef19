"""A replay that is killed repeatedly writes each record once. BASALT_KILLS sets the number of kills."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import basaltmq
from basaltmq.errors import BasaltError
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.store.open import open_view
from basaltmq.streams.imports.imports import runs

KILLS = int(os.environ.get("BASALT_KILLS", "0"))
SEED = int(os.environ.get("BASALT_SEED", str(random.SystemRandom().randrange(1 << 32))))

pytestmark = [
    pytest.mark.spec("F3"),
    pytest.mark.timeout(120 * (KILLS + 2)),
    pytest.mark.xdist_group("spark"),
    pytest.mark.skipif(KILLS == 0, reason="a JVM per kill: set BASALT_KILLS; steps are killed in test_imports"),
]


def progress(path: Path) -> int:
    """Return the target's state of the run, which grows with every intent and every finished step."""
    try:
        with closing(open_view(path)) as store:
            return sum(2 * state.last_batch + (state.intent is not None) + 2 for _, state in runs(store))
    except BasaltError:
        return 0


def test_killed_at_random_each_record_is_replayed_once(spark: SparkSession, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    count = 3000
    with basaltmq.open(tmp_path / "data") as db:
        db.topic("orders", partitions=2).append([Record(b"%d" % i, b"%d" % (i % 50)) for i in range(count)])
    with basaltmq.open(tmp_path / "target") as db:
        db.topic("again", partitions=3)
    job = ReplayJob(
        topics=["orders"],
        source={"path": str(tmp_path / "data")},
        target={"path": str(tmp_path / "target")},
        target_topic="again",
        checkpoint=str(tmp_path / "replay"),
        step_records=max(20, count // (4 * KILLS + 4)),
    )
    killed = 0
    for _ in range(KILLS):
        before, more = progress(tmp_path / "target"), rng.randrange(1, 6)
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.interop.spark.replay_child", msgspec.json.encode(job).decode()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 100
        while child.poll() is None and time.monotonic() < deadline:
            if progress(tmp_path / "target") >= before + more:
                time.sleep(rng.random() * 0.2)
                break
            time.sleep(0.2)  # each check opens the store and takes CPU time from the job
        killed += child.poll() is None
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    print(f"killed {killed} times; {progress(tmp_path / 'target')} traces before the last run")
    replay(spark, job)
    with basaltmq.open(tmp_path / "target") as db:
        found = [(r.key, int(r.value or b"")) for partition in range(3) for r in db.topic("again").read(partition)]
    assert sorted(value for _, value in found) == list(range(count))
    for key in range(50):
        of_key = [value for k, value in found if k == b"%d" % key]
        assert of_key == sorted(of_key), f"records of key {key} are out of order; seed {SEED}"
