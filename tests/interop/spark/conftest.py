"""One Spark session for all tests of a process, because starting it takes longer than any test."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.interop.spark.light import LIGHT

from basaltmq.store.scratch import sweep

SWEEPS = 20
SWEEP_S = 0.1


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    patch = pytest.MonkeyPatch()
    patch.setenv("PYSPARK_PYTHON", sys.executable)
    patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    folders = {
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    builder = SparkSession.builder.master("local[2]")
    for key, value in (LIGHT | folders).items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()
    patch.undo()
    _sweep_after_workers()


def _sweep_after_workers() -> None:
    """Spark's workers end shortly after the session, without cleaning up. The next process removes their files."""
    for _ in range(SWEEPS):
        sweep()
        if not any(Path(tempfile.gettempdir()).glob("basalt-view-*")):
            return
        time.sleep(SWEEP_S)
