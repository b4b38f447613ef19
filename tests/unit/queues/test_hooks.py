"""Script hooks: defaults, circuit breaker, counters, batches. They never lose a message."""

from __future__ import annotations

import pytest

from basaltmq.errors import ScriptError
from basaltmq.queues.config import DURATION_MS_MAX
from basaltmq.queues.ready.fair_scheduler import WEIGHT_MAX
from basaltmq.queues.scripts.hooks import (
    FAILURES_MAX,
    OPEN_NS,
    RECORD_BYTES_MAX,
    Breaker,
    EnqueueAdvice,
    FailureAdvice,
    Hook,
    HookCounters,
    QueueHooks,
)
from basaltmq.queues.scripts.sandbox import ScriptLimits

pytestmark = pytest.mark.spec("C12")

DEFAULT = EnqueueAdvice()


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000_000
        self.step_ns = 0

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


def enqueue_hooks(body: str, clock: Clock | None = None, **state: str) -> QueueHooks:
    return QueueHooks(
        "orders",
        on_enqueue=f"function on_enqueue(msg) {body} end",
        on_failure=None,
        clock_ns=clock or Clock(),
        read_state=state.get,
    )


def failure_hooks(body: str) -> QueueHooks:
    return QueueHooks("orders", on_enqueue=None, on_failure=f"function on_failure(msg) {body} end", clock_ns=Clock())


def counters(hooks: QueueHooks) -> HookCounters:
    assert hooks.on_enqueue is not None
    return hooks.on_enqueue.counters


def advise(hooks: QueueHooks, *flags: str) -> list[EnqueueAdvice]:
    """Return one message per flag, with the flag in the header `f`."""
    return hooks.advise_enqueue([({"f": flag}, 10) for flag in flags])


def test_on_enqueue_sets_key_weight_and_throttles() -> None:
    hooks = enqueue_hooks(
        "return {fairness_key = msg.headers.tenant, weight = msg.payload_size // 100, "
        "throttle_keys = {'tenant:' .. msg.headers.tenant, 'queue:' .. msg.queue, fila.get('extra')}}",
        extra="all",
    )
    got = hooks.advise_enqueue([({"tenant": "acme"}, 300), ({"tenant": "büro"}, 5_000_000_000)])
    assert got == [
        EnqueueAdvice("acme", 3, ("tenant:acme", "queue:orders", "all")),
        EnqueueAdvice("büro", 50_000_000, ("tenant:büro", "queue:orders", "all")),
    ]


def test_on_failure_decides_the_outcome() -> None:
    hooks = failure_hooks(
        "if msg.attempts > 3 or msg.error:find('fatal') then return {action = 'dlq'} end "
        "return {action = 'retry', delay_ms = 100 * msg.attempts + #msg.headers.h + #msg.id + #msg.queue}"
    )
    got = hooks.advise_failure(
        [("id1", {"h": "12"}, 2, "x"), ("i", {"h": ""}, 4, "x"), ("i", {"h": ""}, 1, "a fatal one")]
    )
    assert got == [FailureAdvice("retry", 211), FailureAdvice("dead_letter", None), FailureAdvice("dead_letter", None)]
    assert failure_hooks("return {action = 'dead_letter', delay_ms = 0}").advise_failure([("i", {}, 1, "")]) == [
        FailureAdvice("dead_letter", 0)
    ]
    long = failure_hooks("return {delay_ms = #msg.error}").advise_failure([("i", {}, 1, "x" * 1_000_000)])
    assert long == [FailureAdvice(None, 4096)]


def test_absent_fields_and_hooks_keep_the_defaults() -> None:
    assert advise(enqueue_hooks("return {}"), "a") == [DEFAULT]
    assert advise(enqueue_hooks("return nil"), "a") == [DEFAULT]
    assert advise(enqueue_hooks("return {weight = 2}"), "a") == [EnqueueAdvice(weight=2)]
    assert advise(enqueue_hooks("return {throttle_keys = {}}"), "a") == [EnqueueAdvice(throttle_keys=())]
    none = QueueHooks("q", on_enqueue=None, on_failure=None, clock_ns=Clock())
    assert none.advise_enqueue([({}, 1)] * 3) == [DEFAULT] * 3
    assert none.advise_failure([("i", {}, 1, "")]) == [FailureAdvice()]
    none.release()


def test_syntax_error_rejects_the_queue_and_names_the_line() -> None:
    with pytest.raises(ScriptError, match="on_enqueue does not compile at line 2"):
        QueueHooks("q", on_enqueue="function on_enqueue(msg)\n retrun 1 end", on_failure=None, clock_ns=Clock())
    with pytest.raises(ScriptError, match="on_failure: the script is empty"):
        QueueHooks("q", on_enqueue=None, on_failure="", clock_ns=Clock())
    with pytest.raises(ScriptError, match=r"defines no function on_failure\(msg\)"):
        QueueHooks("q", on_enqueue=None, on_failure="function on_enqueue() end", clock_ns=Clock())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ("{weight = 0}", f"weight must be 1 to {WEIGHT_MAX}, got 0"),
        ("{weight = -1}", "weight must be"),
        (f"{{weight = {WEIGHT_MAX + 1}}}", "weight must be"),
        ("{weight = 'heavy'}", "weight must be a whole number, got string"),
        ("{fairness_key = ('x'):rep(1025)}", "fairness_key has 1025 bytes, the limit is 1024"),
        ("{fairness_key = ('ä'):rep(513)}", "fairness_key has 1026 bytes"),
        ("{fairness_key = {}}", "fairness_key must be a string"),
        ("{fairness_key = '\\xff'}", "not valid UTF-8"),
        ("{throttle_keys = {''}}", "a throttle key must have 1 to 1024 bytes"),
        ("{throttle_keys = {('x'):rep(1025)}}", "a throttle key must have"),
        ("{throttle_keys = 'x'}", "throttle_keys must be a list"),
        (
            "(function() local t = {} for i = 1, 65 do t[i] = 'k' .. i end return {throttle_keys = t} end)()",
            "65 throttle_keys",
        ),
        ("'default'", "on_enqueue must return a table, got string"),
    ],
)
def test_invalid_script_results_give_the_defaults_and_are_counted(answer: str, problem: str) -> None:
    hooks = enqueue_hooks(f"return {answer}")
    assert advise(hooks, "a") == [DEFAULT]
    assert (counters(hooks).runs, counters(hooks).failures) == (1, 1)
    assert problem in counters(hooks).last_error


@pytest.mark.parametrize(
    "answer",
    [
        "{action = 'drop'}",
        "{action = 5}",
        "{delay_ms = -1}",
        f"{{delay_ms = {DURATION_MS_MAX + 1}}}",
        "{delay_ms = 0.5}",
    ],
)
def test_invalid_on_failure_results_give_the_defaults(answer: str) -> None:
    hooks = failure_hooks(f"return {answer}")
    assert hooks.advise_failure([("i", {}, 1, "e")]) == [FailureAdvice()]
    assert hooks.on_failure is not None
    assert hooks.on_failure.counters.failures == 1
    assert hooks.on_failure.counters.last_error


def test_duplicate_throttle_keys_count_once() -> None:
    hooks = enqueue_hooks("return {throttle_keys = {'a', 'b', 'a'}}")
    assert advise(hooks, "x") == [EnqueueAdvice(throttle_keys=("a", "b"))]


SOMETIMES = "if msg.headers.f == '!' then error('bad one') end return {fairness_key = msg.headers.f}"


def test_script_failure_affects_only_its_message() -> None:
    hooks = enqueue_hooks(SOMETIMES)
    got = advise(hooks, "a", "!", "b", "!", "!", "c")
    assert [advice.fairness_key for advice in got] == ["a", None, "b", None, None, "c"]
    seen = counters(hooks)
    assert (seen.runs, seen.failures, seen.trips, seen.skipped, seen.is_open) == (6, 3, 0, 0, False)
    assert seen.last_error == "on_enqueue:1: bad one"


def test_three_failures_in_a_row_open_the_breaker_for_ten_seconds() -> None:
    clock = Clock()
    hooks = enqueue_hooks(SOMETIMES, clock)
    got = advise(hooks, "a", "!", "!", "!", "b", "c")
    assert [advice.fairness_key for advice in got] == ["a", None, None, None, None, None]
    seen = counters(hooks)
    assert (seen.runs, seen.failures, seen.trips, seen.skipped, seen.is_open) == (4, 3, 1, 2, True)
    clock.now_ns += OPEN_NS - 1
    assert advise(hooks, "a") == [DEFAULT]
    clock.now_ns += 1
    assert [advice.fairness_key for advice in advise(hooks, "!", "a", "b")] == [None, None, None]
    seen = counters(hooks)
    assert (seen.runs, seen.failures, seen.trips, seen.skipped, seen.is_open) == (5, 4, 2, 5, True)
    clock.now_ns += OPEN_NS
    assert [advice.fairness_key for advice in advise(hooks, "a", "!", "!", "b")] == ["a", None, None, "b"]
    seen = counters(hooks)
    assert (seen.trips, seen.is_open) == (2, False), "a success closes the breaker and resets the count"


def test_breaker_trial_is_one_message() -> None:
    clock = Clock()
    asked: list[str] = []
    hooks = QueueHooks(
        "q",
        on_enqueue="function on_enqueue(msg) fila.get(msg.headers.f) return {weight = 0} end",
        on_failure=None,
        clock_ns=clock,
        read_state=asked.append,
    )
    advise(hooks, "1", "2", "3")
    asked.clear()
    clock.now_ns += OPEN_NS
    assert advise(hooks, "a", "b", "c") == [DEFAULT] * 3
    assert asked == ["a"]


def test_failures_and_invalid_results_are_counted_across_calls() -> None:
    hooks = enqueue_hooks("return {weight = tonumber(msg.headers.f)}")
    advise(hooks, "0")
    advise(hooks, "-1")
    assert not counters(hooks).is_open
    got = advise(hooks, "0", "7")
    assert got == [DEFAULT, DEFAULT]
    assert (counters(hooks).is_open, counters(hooks).skipped, counters(hooks).failures) == (True, 1, 3)


def test_success_resets_the_failure_count() -> None:
    hooks = enqueue_hooks(SOMETIMES)
    for _ in range(10):
        advise(hooks, "!", "!", "a")
    assert (counters(hooks).trips, counters(hooks).failures) == (0, 20)


def test_clock_set_back_does_not_keep_the_breaker_open() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_MAX):
        assert breaker.allowance() is None
        breaker.failed()
    assert (breaker.allowance(), breaker.trips) == (0, 1)
    clock.now_ns -= 3600 * OPEN_NS
    assert breaker.allowance() == 0
    clock.now_ns += OPEN_NS
    assert breaker.allowance() == 1
    breaker.succeeded()
    assert breaker.allowance() is None


@pytest.mark.parametrize("body", ["while true do end", "local s = 'x' while true do s = s .. s end", "error(nil)"])
def test_malicious_scripts_run_three_times_and_lose_no_message(body: str) -> None:
    hooks = enqueue_hooks(body)
    assert advise(hooks, *["x"] * 500) == [DEFAULT] * 500
    seen = counters(hooks)
    assert (seen.runs, seen.failures, seen.skipped, seen.trips) == (3, 3, 497, 1)


def test_results_match_their_messages_in_large_batches() -> None:
    hooks = enqueue_hooks("return {fairness_key = msg.headers.n}")
    got = hooks.advise_enqueue([({"n": str(n), "pad": "x" * (n % 3000)}, n) for n in range(1500)])
    assert [advice.fairness_key for advice in got] == [str(n) for n in range(1500)]
    assert hooks.advise_enqueue([]) == []


def test_undecodable_messages_get_the_defaults_without_a_failure() -> None:
    hooks = enqueue_hooks("return {fairness_key = msg.headers.a}")
    odd: list[tuple[object, object]] = [
        ({"a": "1"}, 1), ({"a": 5}, 1), ({5: "a"}, 1), (None, 1), ({"a": "x"}, None), ({"a": "x"}, 1 << 70),
        ({"a": "x" * RECORD_BYTES_MAX}, 1), ({"a": "2"}, 1),
    ]  # fmt: skip
    got = hooks.advise_enqueue(odd)  # type: ignore[arg-type]
    assert [advice.fairness_key for advice in got] == ["1", None, None, None, None, None, None, "2"]
    assert (counters(hooks).runs, counters(hooks).failures) == (2, 0)


def test_unreadable_state_is_a_script_failure() -> None:
    def broken(key: str) -> str | None:
        raise OSError("/secret/path is gone")

    hooks = QueueHooks(
        "q", on_enqueue="function on_enqueue() return {fairness_key = fila.get('k')} end", on_failure=None,
        clock_ns=Clock(), read_state=broken,
    )  # fmt: skip
    assert advise(hooks, "a") == [DEFAULT]
    assert "cannot be read" in counters(hooks).last_error
    assert "secret" not in counters(hooks).last_error


def test_script_time_is_never_negative() -> None:
    clock = Clock()
    hooks = enqueue_hooks("return {}", clock)
    clock.step_ns = 1000
    advise(hooks, "a", "b")
    assert counters(hooks).time_ns == 1000
    clock.step_ns = -5
    advise(hooks, "a")
    assert counters(hooks).time_ns == 1000


def test_two_scripts_of_a_queue_are_isolated() -> None:
    hooks = QueueHooks(
        "q",
        on_enqueue="shared = 1 string.upper = nil function on_enqueue() return {fairness_key = tostring(shared)} end",
        on_failure="function on_failure() return {delay_ms = shared or #string.upper('ab')} end",
        clock_ns=Clock(),
    )
    assert advise(hooks, "a") == [EnqueueAdvice("1")]
    assert hooks.advise_failure([("i", {}, 1, "")]) == [FailureAdvice(None, 2)]
    assert isinstance(hooks.on_failure, Hook)
    hooks.release()
    assert advise(hooks, "a") == [EnqueueAdvice("1")]


def test_limits_are_passed_to_the_script() -> None:
    source = "function on_enqueue() for i = 1, 5000 do end return {weight = 2} end"
    tight = QueueHooks(
        "q", on_enqueue=source, on_failure=None, clock_ns=Clock(), limits=ScriptLimits(instructions_max=2000)
    )
    assert advise(tight, "a") == [DEFAULT]
    assert "limit of 2000 instructions exceeded" in counters(tight).last_error
