"""Runs a function over many items on Spark's executors.

Arguments and results are pickled, and the function must be importable on the executors. `progress` gets the number of
completed items. For Spark, the waiting thread polls it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import uuid4

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_INTERVAL_S: Final = 0.2
"""Poll interval of Spark's progress."""

T = TypeVar("T")
R = TypeVar("R")

OnProgress = Callable[[int, int], None]
"""(done, total)."""


class Tasks(Protocol):
    @property
    def width(self) -> int:
        """Number of parallel tasks."""

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: OnProgress | None = None) -> list[R]:
        """Return the results in the order of the items. The first error ends the run."""


class SparkTasks:
    """Runs each item as a Spark task."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    @property
    def width(self) -> int:
        return self._context.defaultParallelism

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: OnProgress | None = None) -> list[R]:
        if not items:
            return []
        found: list[R] = []
        failed: list[BaseException] = []
        group = uuid4().hex

        def collect() -> None:
            try:
                self._context.setJobGroup(group, "basalt", interruptOnCancel=False)
                found.extend(self._context.parallelize(items, len(items)).map(function).collect())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=collect, name="basalt-tasks", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(POLL_INTERVAL_S)
            if progress is not None:
                progress(min(self._done(group), len(items)), len(items))
        if failed:
            raise failed[0]
        return found

    def _done(self, group: str) -> int:
        tracker: Any = self._context.statusTracker()
        done = 0
        for job in tracker.getJobIdsForGroup(group):
            info = tracker.getJobInfo(job)
            for stage in () if info is None else info.stageIds:
                stage_info = tracker.getStageInfo(stage)
                done += 0 if stage_info is None else stage_info.numCompletedTasks
        return done
