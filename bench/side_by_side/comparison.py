"""The jobs of `peers`, their turns, and the rows made of them.

A turn runs a job once on every broker that can do it. A figure is the median of the turns, with the quartiles next to
it. A ratio is the median of the ratios within the turns, because the speed of a machine drifts during a run.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from bench.row import Row
from bench.side_by_side import flood as perf_test
from bench.side_by_side.loads import FAN_OUT, QUEUE, STREAM, Command, Task, at_once, one_after_the_other
from bench.side_by_side.process import Side
from bench.size import sized

TURNS: Final = 5
COUNT: Final = int(os.environ.get("BASALT_BENCH_MESSAGES", sized(100_000, 4_000)))
STREAM_SHARE: Final = 5
"""Streams are faster, so they get more messages for a turn of about the same duration."""

WINDOW: Final = 200
STREAM_WINDOW: Final = 4000
"""Unanswered messages of a stream's publisher: the default of the NATS client. librdkafka has batches of its own."""

CONSUMERS: Final = 10
SMALL: Final = 256
LARGE: Final = 4096
BASALT: Final = "Basalt"

RATE: Final = "msg/s"


class Contender(NamedTuple):
    """A broker, the load of its protocol, and its share of a job's messages."""

    side: Side
    command: Command
    kinds: frozenset[str]
    part: int = 1
    """The broker gets one of this number of messages. Otherwise a broker that syncs every message would take minutes
    per turn."""

    prepare: Callable[[Side, str], None] | None = None
    """Creates the topic, where publishing does not."""


Figures = dict[str, dict[str, list[float]]]
"""By job, then by broker: one rate per turn."""


def run_turns(contenders: Sequence[Contender]) -> Figures:
    seen: Figures = {}
    for job in (_queue(SMALL), _queue(LARGE), _fan_out, _backlog, _stream):
        for turn in range(TURNS):
            for contender in contenders:
                for name, rate in job(contender, turn).items():
                    seen.setdefault(name, {}).setdefault(contender.side.name, []).append(rate)
    return seen


def _queue(size: int) -> Callable[[Contender, int], dict[str, float]]:
    title = f"work queue, {_shown(size)}"

    def job(contender: Contender, turn: int) -> dict[str, float]:
        if QUEUE not in contender.kinds:
            return {}
        task = Task(QUEUE, f"queue-{size}-{turn}", COUNT // contender.part, size, WINDOW)
        return {title: at_once(contender.command, contender.side, task)}

    return job


def _fan_out(contender: Contender, turn: int) -> dict[str, float]:
    if FAN_OUT not in contender.kinds:
        return {}
    count = max(1, COUNT // CONSUMERS // contender.part)
    task = Task(FAN_OUT, f"fan-{turn}", count, SMALL, WINDOW, CONSUMERS)
    return {f"fan-out 1 to {CONSUMERS}, deliveries": at_once(contender.command, contender.side, task)}


def _backlog(contender: Contender, turn: int) -> dict[str, float]:
    if QUEUE not in contender.kinds:
        return {}
    task = Task(QUEUE, f"backlog-{turn}", COUNT // contender.part, SMALL, WINDOW)
    published, drained = one_after_the_other(contender.command, contender.side, task)
    return {"backlog, publish": published, "backlog, drain": drained}


def _stream(contender: Contender, turn: int) -> dict[str, float]:
    if STREAM not in contender.kinds:
        return {}
    task = Task(STREAM, f"stream-{turn}", COUNT * STREAM_SHARE // contender.part, SMALL, STREAM_WINDOW)
    if contender.prepare is not None:
        contender.prepare(contender.side, task.name)
    produced, consumed = one_after_the_other(contender.command, contender.side, task)
    return {"stream, produce": produced, "stream, consume": consumed}


def _shown(size: int) -> str:
    return f"{size // 1024} KiB" if size >= 1024 else f"{size} B"


def run_floods(flood: Callable[[Side, str], perf_test.Flood], sides: Sequence[Side]) -> list[Row]:
    """Return the rates of publishers without confirms and of consumers, and their difference."""
    seen: dict[str, list[perf_test.Flood]] = {side.name: [] for side in sides}
    for turn in range(TURNS):
        for side in sides:
            seen[side.name].append(flood(side, f"flood-{turn}"))
    title = f"perf-test flood, {perf_test.PAIRS} pairs"
    sent = {name: [each.sent for each in floods] for name, floods in seen.items()}
    delivered = {name: [each.delivered for each in floods] for name, floods in seen.items()}
    apart = {
        name: statistics.median(each.sent / max(each.delivered, 1.0) for each in floods)
        for name, floods in seen.items()
    }
    return [
        *rows({f"{title}, sent": sent}, ratios=False),
        *rows({f"{title}, delivered": delivered}),
        *[Row(f"{title}: sent / delivered, {name}", each, "x") for name, each in apart.items()],
    ]


def rows(seen: Figures, *, ratios: bool = True) -> list[Row]:
    made = []
    for job, rates in seen.items():
        for name, each in rates.items():
            low, middle, high = quartiles(each)
            made.append(Row(f"{job}, {name} ({low / 1e3:.1f} to {high / 1e3:.1f} k)", middle, RATE))
        if ratios and BASALT in rates:
            for name, each in rates.items():
                if name != BASALT:
                    paired = zip(rates[BASALT], each, strict=True)
                    ratio = statistics.median(ours / theirs for ours, theirs in paired)
                    made.append(Row(f"{job}: {BASALT} / {name}", ratio, "x"))
    return made


def quartiles(figures: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(figures, n=4, method="inclusive")
    return low, middle, high
