"""Turns over many fairness keys: does a delivery stay O(1)? (SPEC C10)

The rate with 100,000 keys compared with the rate with 10 (weights 1 to 4), in CPU time, measured in turns, the best of
each:

- turns alone, one per call: the same work for both, the cost of the scheduler itself;
- deliveries from queues in memory (a deque per key) in batches of 100: few keys are served in runs of ten, many keys,
  with a quantum of 8, in runs of eight to sixteen.

The bench also measures the cost of churn (a key becomes ready, one is served and becomes idle), and the largest
deviation of a key's share from its weight.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from bench.row import Row
from bench.size import sized

from basaltmq.queues.ready.fair_scheduler import FairScheduler

FEW_KEYS: Final = 10
MANY_KEYS: Final = sized(100_000, 20_000)
BATCH: Final = 100
MESSAGES: Final = sized(200_000, 40_000)
ROUNDS: Final = 5
QUANTUM: Final = 8

RATE_RATIO_MIN: Final = 0.80
SHARE_ERROR_MAX: Final = 0.01


class _Queues:
    """A backlog per key that never becomes empty: fetched messages go to the end of their queue again."""

    def __init__(self, keys: int, quantum: int = 1) -> None:
        self.weights = {f"tenant-{number}": 1 + number % 4 for number in range(keys)}
        self.backlog = {key: deque([(key, 0), (key, 1), (key, 2)]) for key in self.weights}
        self.scheduler = FairScheduler(quantum)
        for key, weight in self.weights.items():
            self.scheduler.ready(key, weight)
        self.batch: list[tuple[str, int]] = []

    def fetch(self, key: str, most: int) -> tuple[int, bool]:
        backlog = self.backlog[key]
        for _ in range(most):
            message = backlog.popleft()
            self.batch.append(message)
            backlog.append(message)
        return most, True

    def rate(self, messages: int) -> float:
        started = time.thread_time()
        for _ in range(messages // BATCH):
            self.batch.clear()
            self.scheduler.deliver(BATCH, self.fetch)
        return messages / (time.thread_time() - started)

    def turn_rate(self, turns: int) -> float:
        started = time.thread_time()
        for _ in range(turns):
            self.scheduler.take(1)
        return turns / (time.thread_time() - started)

    def share_error(self) -> float:
        """Return the largest relative deviation after 400 rounds of all weights."""
        total: Counter[str] = Counter()
        weight_sum = sum(self.weights.values())
        for _ in range(400 * weight_sum // BATCH):
            for key, count in self.scheduler.take(BATCH):
                total[key] += count
        exact = total.total() / weight_sum
        return max(abs(total[key] / (weight * exact) - 1) for key, weight in self.weights.items())


def run(keys: int = MANY_KEYS, messages: int = MESSAGES) -> list[Row]:
    few, many, many_in_runs = _Queues(FEW_KEYS), _Queues(keys), _Queues(keys, QUANTUM)
    rows = _compare("turns alone", lambda: few.turn_rate(messages), lambda: many.turn_rate(messages), keys)
    rows += _compare("batches", lambda: few.rate(messages), lambda: many_in_runs.rate(messages), keys)
    error = _Queues(1000).share_error()
    return [
        *rows,
        Row(f"churn among {keys} keys", _churn(keys, messages), "keys/s"),
        Row("worst share against its weight", error, "of 1", f"<= {SHARE_ERROR_MAX}", error <= SHARE_ERROR_MAX),
    ]


def _compare(how: str, few: Callable[[], float], many: Callable[[], float], keys: int) -> list[Row]:
    rates = [(few(), many()) for _ in range(ROUNDS)]
    at_few, at_many = max(rate for rate, _ in rates), max(rate for _, rate in rates)
    ratio = at_many / at_few
    return [
        Row(f"{how}, {FEW_KEYS} keys", at_few, "msg/s"),
        Row(f"{how}, {keys} keys", at_many, "msg/s"),
        Row(f"{how}, many keys to few", ratio, "x", f">= {RATE_RATIO_MIN}", ratio >= RATE_RATIO_MIN),
    ]


def _churn(keys: int, count: int) -> float:
    scheduler = FairScheduler()
    names = [f"tenant-{number}" for number in range(keys)]
    for name in names[: keys // 2]:
        scheduler.ready(name)
    started = time.thread_time()
    for number in range(count):
        scheduler.ready(names[(keys // 2 + number) % keys], 1 + number % 9)
        ((name, _),) = scheduler.take(1)
        scheduler.idle(name)
    return count / (time.thread_time() - started)


if __name__ == "__main__":
    for row in run():
        print(f"{row.name:40} {row.value:14,.4g} {row.unit:8} {row.bar} {'' if row.passed is None else row.passed}")
