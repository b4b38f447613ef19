"""Scripts of one call, and of all calls together, take bounded time. Further messages get the defaults."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.unit.queues.conftest import Planes

from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.lifecycle.entry_builder import ENQUEUE_MAX
from basaltmq.queues.message import PAYLOAD_BYTES_MAX
from basaltmq.queues.scripts.budget import CALL_MS, ScriptBudget

pytestmark = pytest.mark.spec("C12")

LOOPS = "local x = 0 for i = 1, 20000 do x = x + i end"
COPIES = "local t = {} for i = 1, 40 do t[i] = ('x'):rep(20000 + i) end"
PATTERNS = "local s = ('a'):rep(300) for i = 1, 3 do s:find('.-.-b') end"
FAILS_OFTEN = "if #msg.headers.n % 3 ~= 0 then local s = 'x' while true do s = s .. s end end"
HEAVY = {"loops": LOOPS, "copies": COPIES, "patterns": PATTERNS, "failures": FAILS_OFTEN}

BOUND_MS = 4 * CALL_MS
"""Maximum CPU time of a call: the budget, one more record, and building the messages."""


class Clocks:
    """Manual wall and CPU clocks."""

    def __init__(self) -> None:
        self.now_ns = 10**12
        self.cpu_ns = 0

    def budget(self, call_ms: int = CALL_MS, share: float = 0.5) -> ScriptBudget:
        return ScriptBudget(call_ms, share, clock_ns=lambda: self.now_ns, cpu_ns=lambda: self.cpu_ns)

    def call(self, budget: ScriptBudget, took_ms: int) -> int:
        """Run a call of this duration. Return its budget in milliseconds."""
        budget.begin()
        had = budget.left_us() // 1000
        self.cpu_ns += took_ms * 1_000_000
        self.now_ns += took_ms * 1_000_000
        budget.end()
        return had


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return (time.thread_time() - began) * 1000


def drafts(count: int) -> list[Draft]:
    return [Draft(payload=b"x", headers={"n": "n" * (number % 10)}) for number in range(count)]


def test_budget_refills_with_a_share_of_elapsed_time() -> None:
    clocks = Clocks()
    budget = clocks.budget()
    assert clocks.call(budget, 30) == 40
    assert clocks.call(budget, 0) == 25, "10 ms left, plus half of 30 ms"
    clocks.now_ns += 10**9
    assert clocks.call(budget, 60) == 40, "at most the budget of one call"
    assert clocks.call(budget, 500) == 10, "half of 60 ms, minus a debt of 20 ms"
    clocks.now_ns -= 10**12
    assert clocks.call(budget, 0) <= 0, "a clock set back adds nothing"
    clocks.now_ns += 160 * 1_000_000
    assert clocks.call(budget, 0) == 40, "debt is limited"


def test_embedded_program_has_the_full_budget_per_call() -> None:
    clocks = Clocks()
    budget = clocks.budget(1000, share=1)
    assert [clocks.call(budget, 900), clocks.call(budget, 2000), clocks.call(budget, 0)] == [1000] * 3


@pytest.mark.parametrize("body", HEAVY.values(), ids=HEAVY)
def test_call_with_an_expensive_on_enqueue_takes_bounded_time(planes: Planes, body: str) -> None:
    source = f"function on_enqueue(msg) {body} return {{fairness_key = 'script'}} end"
    with planes.open() as plane:
        plane.create(QueueConfig(name="q", on_enqueue_script=source))
        ids: list[bytes] = []
        assert cpu_ms(lambda: ids.extend(plane.enqueue("q", drafts(500)))) < BOUND_MS
        assert len(set(ids)) == 500, "no message is lost"
        reported = plane.script_counters("q")["on_enqueue"]
        assert reported.runs + reported.skipped == 500
        assert reported.skipped > 100
        assert "defaults apply" in reported.last_error or "limit" in reported.last_error
        keys = [delivery.message().fairness_key for delivery in plane.lease("q", 500)]
        assert len(keys) == 500
        assert keys.count("script") == reported.runs - reported.failures


@pytest.mark.parametrize("body", HEAVY.values(), ids=HEAVY)
def test_many_simultaneous_failures_take_bounded_time(planes: Planes, body: str) -> None:
    source = f"function on_failure(msg) {body} return {{action = 'retry'}} end"
    with planes.open() as plane:
        plane.create(QueueConfig(name="q", on_failure_script=source, visibility_timeout_ms=1000))
        plane.enqueue("q", drafts(500))
        leased = plane.lease("q", 500)
        assert cpu_ms(lambda: plane.nack("q", leased[0].token, [each.id for each in leased], error="no")) < BOUND_MS
        reported = plane.script_counters("q")["on_failure"]
        assert reported.runs + reported.skipped == 500
        for _ in range(5):
            plane.lease("q", 100)
        planes.clock.now_ns += 10**10
        for _ in range(50):
            if plane.stats("q")["ready"] == 500:
                break
            assert cpu_ms(lambda: plane.run_due(planes.clock.now_ns)) < 2 * BOUND_MS, "all leases expired at once"
        assert len(plane.lease("q", 500)) == 500, "every message is ready again"


def test_consecutive_calls_share_a_budget(planes: Planes) -> None:
    """Many small calls take no longer than one large call."""
    clocks = Clocks()
    budget = ScriptBudget(clock_ns=lambda: clocks.now_ns)
    source = f"function on_enqueue(msg) {LOOPS} return {{weight = 2}} end"
    with planes.open(script_budget=budget) as plane:
        for name in ("a", "b"):
            plane.create(QueueConfig(name=name, on_enqueue_script=source))

        def publish() -> None:
            for number in range(250):
                plane.enqueue("ab"[number % 2], drafts(2))

        assert cpu_ms(publish) < 2 * BOUND_MS
        reported = [plane.script_counters(name)["on_enqueue"] for name in "ab"]
        assert sum(each.skipped for each in reported) > 300
        clocks.now_ns += 10**9
        before = reported[0].runs
        plane.enqueue("a", drafts(1))
        assert plane.script_counters("a")["on_enqueue"].runs == before + 1, "time has passed"


def test_cheap_script_runs_for_all_messages_of_the_largest_call(planes: Planes) -> None:
    source = "function on_enqueue(msg) return {weight = 2} end"
    with planes.open(script_budget=ScriptBudget(10_000, share=1)) as plane:
        plane.create(QueueConfig(name="q", on_enqueue_script=source))
        plane.enqueue("q", [b"x"] * ENQUEUE_MAX)
        assert plane.script_counters("q")["on_enqueue"].runs == ENQUEUE_MAX


def test_invalid_messages_are_refused_before_the_script_runs(planes: Planes) -> None:
    with planes.open() as plane:
        plane.create(QueueConfig(name="q", on_enqueue_script="function on_enqueue(msg) return nil end"))
        large = bytes(PAYLOAD_BYTES_MAX + 1)
        for sent, error in (
            ([b"x"] * (ENQUEUE_MAX + 1), LimitExceededError),
            ([b"x", large], LimitExceededError),
            ([Draft(payload=b"x"), Draft(payload=b"x", headers={"h": "x" * (2 << 20)})], LimitExceededError),
            ([b"x", "text"], InvalidArgumentError),
            ([Draft(payload=b"x", weight=0)], InvalidArgumentError),
        ):
            with pytest.raises(error):
                plane.enqueue("q", sent)  # type: ignore[arg-type]
        assert plane.script_counters("q")["on_enqueue"].runs == 0
        work = plane.transaction()
        for given in ([b"x"] * (ENQUEUE_MAX + 1), [b"x", large]):
            with pytest.raises(LimitExceededError):
                work.enqueue("q", given)
        assert plane.script_counters("q")["on_enqueue"].runs == 0
