"""Functions run over many things at once: by Spark's executors, or one after the other where there is no Spark.

What a function is given and gives back is pickled, and it must be importable where it runs. `progress` hears how many
are done while others run; Spark is asked, every so often, from the thread that waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import uuid4

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK_INTERVAL_S: Final = 0.2
"""Between two looks at how far Spark is."""

T = TypeVar("T")
R = TypeVar("R")

Told = Callable[[int, int], None]
"""(done, in all)."""


class Tasks(Protocol):
    """Something that runs functions."""

    @property
    def width(self) -> int:
        """How many run at once."""

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: Told | None = None) -> list[R]:
        """What the function gives for each item, in their order; the first error ends it."""


class LocalTasks:
    """In this thread."""

    def __init__(self, width: int = 2) -> None:
        self.width = width

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: Told | None = None) -> list[R]:
        found = []
        for done, item in enumerate(items, 1):
            found.append(function(item))
            if progress is not None:
                progress(done, len(items))
        return found


class SparkTasks:
    """On Spark's executors, an item to a task."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext

    @property
    def width(self) -> int:
        return self._context.defaultParallelism

    def run(self, function: Callable[[T], R], items: Sequence[T], progress: Told | None = None) -> list[R]:
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
            thread.join(LOOK_INTERVAL_S)
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
                told = tracker.getStageInfo(stage)
                done += 0 if told is None else told.numCompletedTasks
        return done
