"""Turns of the fair scheduler: exact shares, no starvation."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from basaltmq.errors import InvalidArgumentError
from basaltmq.queues.ready.fair_scheduler import WEIGHT_MAX, FairScheduler

pytestmark = [pytest.mark.spec("C10"), pytest.mark.promise("P8")]


def scheduler(weights: dict[str, int]) -> FairScheduler:
    made = FairScheduler()
    for key, weight in weights.items():
        made.ready(key, weight)
    return made


def served(target: FairScheduler, count: int, batch: int) -> Counter[str]:
    total: Counter[str] = Counter()
    while count > 0:
        turns = target.take(min(batch, count))
        for key, runs in turns:
            total[key] += runs
            count -= runs
    return total


def assert_shares(total: Counter[str], weights: dict[str, int], slack: float = 3.0) -> None:
    """Check that each key is within 1 % or `slack` messages of its share."""
    count, weight_sum = total.total(), sum(weights.values())
    for key, weight in weights.items():
        share = count * weight / weight_sum
        assert abs(total[key] - share) <= max(share * 0.01, slack), (key, weight, total[key], share)


@pytest.mark.parametrize("batch", [1, 7, 100, 1000])
@pytest.mark.parametrize(
    "weights",
    [
        [1] * 10,
        [1, 2, 3],
        [1, 1000],
        [7, 8],
        [15, 16, 17, 31, 32, 33],
        [1, 10, 100, 1000],
        [3] * 50 + [5] * 20 + [64],
        list(range(1, 101)),
        [1 << 20, 1],
        [WEIGHT_MAX, WEIGHT_MAX, WEIGHT_MAX // 3],
    ],
)
def test_shares_match_the_weights_within_one_percent(weights: list[int], batch: int) -> None:
    named = {f"k{i}": weight for i, weight in enumerate(weights)}
    assert_shares(served(scheduler(named), 30_000, batch), named)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, WEIGHT_MAX)), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 4000),
)
def test_shares_are_exact_to_a_few_messages_at_any_time(weights: list[int], batch: int, count: int) -> None:
    named = {f"k{i}": weight for i, weight in enumerate(weights)}
    target = scheduler(named)
    assert_shares(served(target, count, batch), named, slack=5.0)


def test_shares_over_a_hundred_thousand_keys() -> None:
    named = {f"k{i}": 1 + i % 4 for i in range(100_000)}
    total = served(scheduler(named), 4 * sum(named.values()), 1000)
    assert max(abs(total[key] - 4 * weight) for key, weight in named.items()) <= 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=2, max_size=60), st.integers(0, 2**32))
def test_no_ready_key_waits_longer_than_three_times_its_interval(weights: list[int], seed: int) -> None:
    named = {f"k{i}": weight for i, weight in enumerate(weights)}
    target = scheduler(named)
    key = random.Random(seed).choice(list(named))
    bound = 3 * sum(weights) // named[key] + 2 * len(weights) + 3
    waited = 0
    for _ in range(min(4 * bound, 20_000)):
        ((got, _),) = target.take(1)
        waited = 0 if got == key else waited + 1
        assert waited <= bound


def test_heavy_keys_are_interleaved() -> None:
    target = scheduler({"heavy": 1000, "light": 100})
    order = [target.take(1)[0][0] for _ in range(1100)]
    gaps = [i for i, key in enumerate(order) if key == "light"]
    assert 95 <= len(gaps) <= 105
    assert max(b - a for a, b in itertools.pairwise(gaps)) <= 15


def test_batch_has_distinct_keys_in_turn_order() -> None:
    target = scheduler({"a": 1, "b": 1, "c": 2})
    turns = target.take(40)
    assert sorted(turns) == [("a", 10), ("b", 10), ("c", 20)]
    assert scheduler({"a": 1}).take(1000) == [("a", 1000)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_batches_equal_single_turns(weights: list[int], batches: list[int]) -> None:
    named = {f"k{i}": weight for i, weight in enumerate(weights)}
    one, many = scheduler(named), scheduler(named)
    for batch in batches:
        single = Counter(one.take(1)[0][0] for _ in range(batch))
        assert single == Counter(dict(many.take(batch)))


def test_turns_are_deterministic() -> None:
    def run() -> list[list[tuple[str, int]]]:
        generator = random.Random(5)
        target = FairScheduler()
        out = []
        for _ in range(2000):
            key = f"k{generator.randrange(50)}"
            generator.choice([target.ready, target.block, target.idle])(key)
            target.ready(key, generator.randint(1, 99))
            out.append(target.take(generator.randint(0, 5)))
        return out

    assert run() == run()


@pytest.mark.parametrize("quantum", [2, 8, 100])
def test_quantum_lengthens_runs_and_keeps_shares(quantum: int) -> None:
    target = FairScheduler(quantum)
    weights = {f"k{i}": 1 + i % 3 for i in range(60)}
    for key, weight in weights.items():
        target.ready(key, weight)
    assert len(target.take(2 * quantum)) <= 4
    assert_shares(served(target, 100_000, 50), weights, slack=3.0 * quantum)
    for wrong in (0, -1, 1.0, True, 1025):
        with pytest.raises(InvalidArgumentError, match="quantum of a scheduler must be 1 to 1024"):
            FairScheduler(wrong)  # type: ignore[arg-type]


def test_unknown_empty_and_blocked_keys_get_no_turn() -> None:
    target = FairScheduler()
    assert target.take(5) == []
    target.idle("x")
    target.block("x")
    target.give_back("x", 5)
    assert len(target) == 0
    target.ready("a", 3)
    target.ready("b")
    target.block("a")
    assert target.take(4) == [("b", 4)]
    assert (target.is_ready("a"), "a" in target, target.weight("a")) == (False, True, 3)
    target.ready("a")
    assert Counter(dict(target.take(40))) == Counter(a=30, b=10)
    target.idle("a")
    target.idle("b")
    assert (target.take(4), len(target), target.weight("a")) == ([], 0, None)


@pytest.mark.parametrize("weight", [0, -1, WEIGHT_MAX + 1, 1.5, "3", True, None])
def test_out_of_range_weights_are_refused(weight: object) -> None:
    target = scheduler({"a": 1})
    if weight is not None:
        for key in ("b",) if weight is True else ("a", "b"):
            with pytest.raises(InvalidArgumentError, match="weight of a fairness key must be 1 to 4294967295"):
                target.ready(key, weight)  # type: ignore[arg-type]
    assert target.take(2) == [("a", 2)]
    assert "b" not in target


def test_changed_weight_changes_the_share() -> None:
    weights = {"a": 1, "b": 1, "c": 40}
    target = scheduler(weights)
    served(target, 1000, 10)
    for change in ({"a": 9}, {"a": 300}, {"c": 2}, {"a": 1}, {"b": 17, "c": 17}):
        for key, weight in change.items():
            target.ready(key, weight)
            assert target.weight(key) == weight
        weights |= change
        served(target, 2 * sum(weights.values()), 10)
        assert_shares(served(target, 10_000, 10), weights)


def test_raising_and_lowering_a_weight_does_not_delay_its_key() -> None:
    target = scheduler({f"k{i}": 1 for i in range(50)} | {"flapping": 1})
    total: Counter[str] = Counter()
    for i in range(5000):
        target.ready("flapping", (1, 1000, 3, 50_000)[i % 4])
        total[target.take(1)[0][0]] += 1
    assert total["flapping"] > 4000
    assert min(total[f"k{i}"] for i in range(50)) >= 1 or total["flapping"] > 4900


def test_growing_weight_class_is_not_delayed_by_old_debt() -> None:
    target = scheduler({"light": 1, "heavy": 1_000_000})
    served(target, 1, 1)
    while target.take(1) != [("heavy", 1)]:
        pass
    weights = {"light": 1, "heavy": 1_000_000} | {f"l{i}": 1 for i in range(100_000)}
    for key in weights:
        target.ready(key)
    total = served(target, 11_000, 100)
    light = total.total() - total["heavy"]
    assert abs(light - 1000) <= 20


def test_intermittent_key_gets_no_more_than_its_share() -> None:
    target = scheduler({f"k{i}": 1 for i in range(9)})
    total: Counter[str] = Counter()
    target.ready("jumper")
    for _ in range(10_000):
        ((key, _),) = target.take(1)
        total[key] += 1
        if key == "jumper":
            target.idle("jumper")
        target.ready("jumper")
    assert_shares(total, {f"k{i}": 1 for i in range(9)} | {"jumper": 1})


def test_returned_turns_are_not_charged() -> None:
    """One key uses only half of its turns in each batch."""
    weights = {"a": 1, "b": 1, "c": 6}
    target = scheduler(weights)
    total: Counter[str] = Counter()
    for _ in range(3000):
        for key, runs in target.take(16):
            used = (runs + 1) // 2 if key == "a" else runs
            target.give_back(key, runs - used)
            total[key] += used
    assert_shares(total, weights, slack=20)
    with pytest.raises(InvalidArgumentError, match="turns to give back"):
        target.give_back("a", -1)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_truncated_batches_still_share_evenly(stop_after: int) -> None:
    weights = {"a": 1, "b": 1, "c": 2, "d": 8}
    target = scheduler(weights)
    total: Counter[str] = Counter()
    for _ in range(12_000):
        turns = target.take(100)
        left = stop_after
        for key, runs in turns:
            used = min(left, runs)
            left -= used
            total[key] += used
            target.give_back(key, runs - used)
    assert min(total.values()) > 0
    assert_shares(total, weights, slack=120)


def test_deliver_stops_at_the_count_or_when_all_keys_are_empty() -> None:
    backlog = {"a": 3, "b": 50, "c": 1, "d": 0}
    target = scheduler(dict.fromkeys(backlog, 1))

    def fetch(key: str, most: int) -> tuple[int, bool]:
        got = min(most, backlog[key])
        backlog[key] -= got
        return got, backlog[key] > 0

    assert target.deliver(20, fetch) == 20
    assert backlog == {"a": 0, "b": 34, "c": 0, "d": 0}
    assert target.deliver(100, fetch) == 34
    assert len(target) == 0


def test_deliver_skips_a_key_that_becomes_blocked() -> None:
    target = scheduler({"a": 1, "b": 1})

    def fetch(key: str, most: int) -> tuple[int, bool]:
        if key == "a":
            target.block("a")
            return 0, False
        return most, True

    assert target.deliver(10, fetch) == 10
    assert "a" in target
    target.ready("a")
    assert Counter(dict(target.take(10))) == Counter(a=5, b=5)


def test_failed_fetch_charges_no_turn() -> None:
    """The second fetch of every batch fails. The turns of the other keys are kept."""
    weights = {"a": 1, "b": 1, "c": 5}
    target = scheduler(weights)
    total: Counter[str] = Counter()
    first = True

    def fetch(key: str, most: int) -> tuple[int, bool]:
        nonlocal first
        if not first:
            raise OSError("disk")
        first = False
        total[key] += most
        return most, True

    for _ in range(3000):
        first = True
        with pytest.raises(OSError, match="disk"):
            target.deliver(7, fetch)
    assert_shares(total, weights, slack=30)


class Churn(RuleBasedStateMachine):
    """Random calls against a set of ready keys: only ready keys get turns, and no ready key is skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.target = FairScheduler()
        self.ready: dict[str, int] = {}
        self.blocked: dict[str, int] = {}

    keys = st.sampled_from([f"k{i}" for i in range(8)])
    weights = st.one_of(st.integers(1, 9), st.sampled_from([100, 1023, 1024, WEIGHT_MAX]))

    @rule(key=keys, weight=st.none() | weights)
    def make_ready(self, key: str, weight: int | None) -> None:
        known = self.ready.get(key) or self.blocked.pop(key, None) or 1
        self.target.ready(key, weight)
        self.ready[key] = weight or known

    @rule(key=keys)
    def make_blocked(self, key: str) -> None:
        self.target.block(key)
        if key in self.ready:
            self.blocked[key] = self.ready.pop(key)

    @rule(key=keys)
    def make_idle(self, key: str) -> None:
        self.target.idle(key)
        self.ready.pop(key, None)
        self.blocked.pop(key, None)

    @rule(count=st.integers(0, 30), back=st.integers(0, 5))
    def take(self, count: int, back: int) -> None:
        turns = self.target.take(count)
        assert sum(runs for _, runs in turns) == (count if self.ready else 0)
        assert len({key for key, _ in turns}) == len(turns)
        for key, runs in turns:
            assert key in self.ready
            self.target.give_back(key, min(back, runs))

    @precondition(lambda self: len(self.ready) > 1 and max(self.ready.values()) < 5000)
    @rule()
    def shares_settle(self) -> None:
        for key, weight in self.ready.items():
            self.target.ready(key, weight)
        served(self.target, 2 * sum(self.ready.values()) + 400, 50)
        total = served(self.target, 4 * sum(self.ready.values()), 50)
        assert_shares(total, self.ready, slack=8)

    @invariant()
    def counts_agree(self) -> None:
        assert all(self.target.is_ready(key) for key in self.ready)
        assert len(self.target) == len(self.ready) + len(self.blocked)
        for key, weight in (self.ready | self.blocked).items():
            assert self.target.weight(key) == weight


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
