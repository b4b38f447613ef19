"""Turns over many fairness keys: does a delivery stay O(1)? (SPEC C10)

The scheduler with queues in memory (a deque per key, weights 1 to 4), so that its own cost shows: the rate with
100,000 keys against the rate with 10, measured in turns and in CPU time, the best of each. One message per call asks the same work of
both. In batches of 100, few keys are served in runs of ten and many keys, with a quantum of 8, in runs of ten to
twenty. Also what churn costs (a key becomes ready, one is served and becomes idle), and the worst deviation of a key's
share from its weight.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import Final, NamedTuple

from basaltmq.queues.fairness import FairScheduler

FEW_KEYS: Final = 10
MANY_KEYS: Final = 100_000
BATCH: Final = 100
MESSAGES: Final = 200_000
ROUNDS: Final = 5
QUANTUM: Final = 8

RATE_RATIO_MIN: Final = 0.80
SHARE_ERROR_MAX: Final = 0.01


class Row(NamedTuple):
    """A figure, and the bar it has to clear if there is one."""

    name: str
    value: float
    unit: str
    bar: str = ""
    passed: bool | None = None


class _Queues:
    """A backlog per key that never runs dry: what is fetched goes to the end of its queue again."""

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

    def rate(self, messages: int, batch: int) -> float:
        started = time.thread_time()
        for _ in range(messages // batch):
            self.batch.clear()
            self.scheduler.deliver(batch, self.fetch)
        return messages / (time.thread_time() - started)

    def share_error(self) -> float:
        """The worst relative deviation after 400 rounds of all weights."""
        total: Counter[str] = Counter()
        weight_sum = sum(self.weights.values())
        for _ in range(400 * weight_sum // BATCH):
            for key, count in self.scheduler.take(BATCH):
                total[key] += count
        exact = total.total() / weight_sum
        return max(abs(total[key] / (weight * exact) - 1) for key, weight in self.weights.items())


def run(keys: int = MANY_KEYS, messages: int = MESSAGES) -> list[Row]:
    few, many, many_in_runs = _Queues(FEW_KEYS), _Queues(keys), _Queues(keys, QUANTUM)
    rows = _compare("one by one", few, many, messages, 1)
    rows += _compare(f"batches of {BATCH}", few, many_in_runs, messages, BATCH)
    error = _Queues(1000).share_error()
    return [
        *rows,
        Row(f"churn among {keys} keys", _churn(keys, messages), "keys/s"),
        Row("worst share against its weight", error, "of 1", f"<= {SHARE_ERROR_MAX}", error <= SHARE_ERROR_MAX),
    ]


def _compare(how: str, few: _Queues, many: _Queues, messages: int, batch: int) -> list[Row]:
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        rates[0].append(few.rate(messages, batch))
        rates[1].append(many.rate(messages, batch))
    at_few, at_many = max(rates[0]), max(rates[1])
    ratio = at_many / at_few
    return [
        Row(f"{how}, {len(few.weights)} keys", at_few, "msg/s"),
        Row(f"{how}, {len(many.weights)} keys", at_many, "msg/s"),
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
