"""Runs a queue's on_enqueue and on_failure scripts, with a circuit breaker, counters and defaults (SPEC C12).

A script only advises. If it fails, hits a limit or returns an invalid result, the default applies, the failure is
counted, and its text is kept. So nothing here raises for a message, except for errors that are not the script's (an
interrupt).

    on_enqueue(msg{headers, payload_size, queue})         -> {fairness_key, weight, throttle_keys}   or nil
    on_failure(msg{headers, id, attempts, queue, error})  -> {action = "retry" | "dlq", delay_ms}    or nil

An absent field keeps the value of the publisher or of the queue's configuration.

Breaker: after three consecutive failures the script is not called for ten seconds, and messages get the defaults
(counted as skipped). Then one message is tried: success closes the breaker, failure starts another ten seconds.

The scripts of all queues share a `ScriptBudget`. Messages beyond it get the defaults, counted as skipped.

One call carries many messages, with the same result as one call per message. A failure counts between the successes
around it. Messages after the failure that opens the breaker get the defaults.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, Literal, TypeVar

from basaltmq.queues.config import DURATION_MS_MAX
from basaltmq.queues.message import FAIRNESS_KEY_BYTES_MAX, HEADERS_BYTES_MAX, THROTTLE_KEYS_MAX
from basaltmq.queues.ready.fair_scheduler import WEIGHT_MAX
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.queues.scripts.sandbox import LuaScript, ScriptLimits, ScriptShape, Value

FAILURES_MAX: Final = 3
"""Consecutive failures that open the breaker. A single failure may be caused by the message."""

OPEN_NS: Final = 10_000_000_000

ERROR_CHARACTERS_MAX: Final = 4096
"""Characters of a consumer's error text that a script sees."""

PIECE_MESSAGES: Final = 256
"""Messages encoded for a script at a time, so that few are encoded needlessly when time runs out."""

RECORD_BYTES_MAX: Final = 2 * HEADERS_BYTES_MAX
"""Largest record: the headers of a message, their lengths, and the other fields. The queue rejects larger messages."""

ON_ENQUEUE: Final = ScriptShape(
    "on_enqueue",
    (("queue", "string"), ("payload_size", "integer")),
    (("fairness_key", "string"), ("weight", "integer"), ("throttle_keys", "strings")),
)
ON_FAILURE: Final = ScriptShape(
    "on_failure",
    (("queue", "string"), ("id", "string"), ("attempts", "integer"), ("error", "string")),
    (("action", "string"), ("delay_ms", "integer")),
)

_ACTIONS: Final[dict[str, Literal["retry", "dead_letter"]]] = {
    "retry": "retry",
    "dlq": "dead_letter",
    "dead_letter": "dead_letter",
}


@dataclass(frozen=True, slots=True)
class EnqueueAdvice:
    """Changes that on_enqueue requests; None keeps a field."""

    fairness_key: str | None = None
    weight: int | None = None
    throttle_keys: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class FailureAdvice:
    """What on_failure requests; None leaves the decision to the queue's configuration."""

    action: Literal["retry", "dead_letter"] | None = None
    delay_ms: int | None = None


@dataclass(frozen=True, slots=True)
class HookCounters:
    """Counters of a hook: `runs` are messages that the script was called for, `skipped` the others."""

    runs: int = 0
    failures: int = 0
    trips: int = 0
    skipped: int = 0
    time_ns: int = 0
    last_error: str = ""
    is_open: bool = False


class Breaker:
    """Circuit breaker. Closed: calls pass. Open: none pass. After OPEN_NS: one call passes and decides."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._failures = 0
        self._opened_ns: int | None = None
        self.trips = 0

    @property
    def is_open(self) -> bool:
        return self._opened_ns is not None

    def allowance(self) -> int | None:
        """How many calls may be made: None for any number, 1 for a trial, 0 for none."""
        if self._opened_ns is None:
            return None
        now_ns = self._clock_ns()
        if now_ns < self._opened_ns:
            # The clock was set back: restart the ten seconds, so that they do not last for hours.
            self._opened_ns = now_ns
        return 1 if now_ns - self._opened_ns >= OPEN_NS else 0

    def succeeded(self) -> None:
        self._failures = 0
        self._opened_ns = None

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= FAILURES_MAX:
            self._opened_ns = self._clock_ns()
            self.trips += 1


class _InvalidResult(Exception):
    """A result with the right types and invalid values; the text says why."""


A = TypeVar("A")


class Hook(Generic[A]):
    """One script of a queue, with its breaker and counters."""

    def __init__(
        self,
        script: LuaScript,
        read: Callable[[tuple[Value, ...]], A],
        default: A,
        clock_ns: Callable[[], int],
        budget: ScriptBudget,
    ) -> None:
        self._script = script
        self._read = read
        self._default = default
        self._clock_ns = clock_ns
        self._breaker = Breaker(clock_ns)
        self._budget = budget
        self._counters = HookCounters()

    @property
    def counters(self) -> HookCounters:
        return replace(self._counters, trips=self._breaker.trips, is_open=self._breaker.is_open)

    def _record(self, values: Sequence[str | int], headers: Mapping[str, str]) -> bytes | None:
        """Encode a message for the script; None if it cannot be encoded or is too large."""
        try:
            record = self._script.encode_record(values, headers)
        except (AttributeError, TypeError, ValueError, AssertionError, struct.error):
            return None
        return record if len(record) <= RECORD_BYTES_MAX else None

    def advise(self, messages: Sequence[tuple[Sequence[str | int], Mapping[str, str]]]) -> list[A]:
        """Return the script's result for each message (values, headers), or the default where it has none.

        All messages share the time of one call. Messages left when it ends get the default.
        """
        answers: list[A] = []
        self._budget.begin()
        try:
            for at in range(0, len(messages), PIECE_MESSAGES):
                if self._budget.left_us() <= 0:
                    break
                piece = messages[at : at + PIECE_MESSAGES]
                records = [self._record(values, headers) for values, headers in piece]
                given = iter(self._run([record for record in records if record is not None]))
                answers += [self._default if record is None else next(given) for record in records]
        finally:
            self._budget.end()
        skipped = len(messages) - len(answers)
        if skipped:
            self._counters = replace(
                self._counters, skipped=self._counters.skipped + skipped, last_error=self._script.over_budget.text
            )
        return answers + [self._default] * skipped

    def release(self) -> None:
        """Free the script's memory until the next call."""
        self._script.release()

    def _run(self, records: Sequence[bytes]) -> list[A]:
        answers: list[A] = []
        started_ns = self._clock_ns()
        failures = runs = 0
        error = self._counters.last_error
        while len(answers) < len(records):
            allowed = self._breaker.allowance()
            if allowed == 0:
                break
            end = len(records) if allowed is None else len(answers) + allowed
            rows, failure = self._script.run(records[len(answers) : end], self._budget.left_us)
            is_over_budget = failure is not None and failure.fault == "budget"
            problem = None if failure is None or is_over_budget else failure.text
            for row in rows:
                try:
                    answers.append(self._read(row))
                except _InvalidResult as invalid:
                    problem = str(invalid)
                    break
                runs += 1
                self._breaker.succeeded()
            if problem is not None:
                runs += 1
                failures += 1
                error = problem
                answers.append(self._default)
                self._breaker.failed()
            elif is_over_budget and failure is not None:
                error = failure.text
                break
        counters = self._counters
        skipped = len(records) - len(answers)
        answers += [self._default] * skipped
        self._counters = replace(
            counters,
            runs=counters.runs + runs,
            failures=counters.failures + failures,
            skipped=counters.skipped + skipped,
            time_ns=counters.time_ns + max(0, self._clock_ns() - started_ns),
            last_error=error,
        )
        return answers


class QueueHooks:
    """The scripts of one queue. Raises ScriptError for a script that does not compile or load."""

    def __init__(
        self,
        queue: str,
        *,
        on_enqueue: str | None,
        on_failure: str | None,
        clock_ns: Callable[[], int],
        read_state: Callable[[str], str | None] | None = None,
        limits: ScriptLimits | None = None,
        budget: ScriptBudget | None = None,
    ) -> None:
        self._queue = queue
        budget = budget or ScriptBudget()

        def script(source: str, shape: ScriptShape) -> LuaScript:
            return LuaScript(source, shape, limits=limits, read_state=read_state)

        self.on_enqueue: Hook[EnqueueAdvice] | None = None
        self.on_failure: Hook[FailureAdvice] | None = None
        if on_enqueue is not None:
            self.on_enqueue = Hook(script(on_enqueue, ON_ENQUEUE), _enqueue_advice, EnqueueAdvice(), clock_ns, budget)
        if on_failure is not None:
            self.on_failure = Hook(script(on_failure, ON_FAILURE), _failure_advice, FailureAdvice(), clock_ns, budget)

    def advise_enqueue(self, messages: Sequence[tuple[Mapping[str, str], int]]) -> list[EnqueueAdvice]:
        """Run on_enqueue for messages given as (headers, payload size)."""
        hook = self.on_enqueue
        if hook is None:
            return [EnqueueAdvice()] * len(messages)
        return hook.advise([((self._queue, size), headers) for headers, size in messages])

    def advise_failure(self, messages: Sequence[tuple[str, Mapping[str, str], int, str]]) -> list[FailureAdvice]:
        """Run on_failure for messages given as (id, headers, attempts, error text)."""
        hook = self.on_failure
        if hook is None:
            return [FailureAdvice()] * len(messages)
        return hook.advise(
            [
                ((self._queue, message_id, attempts, error[:ERROR_CHARACTERS_MAX]), headers)
                for message_id, headers, attempts, error in messages
            ]
        )

    def release(self) -> None:
        """Free the memory of both scripts until the next call."""
        for hook in (self.on_enqueue, self.on_failure):
            if hook is not None:
                hook.release()


def _enqueue_advice(row: tuple[Value, ...]) -> EnqueueAdvice:
    key, weight, throttle_keys = row
    assert key is None or isinstance(key, str)
    assert weight is None or isinstance(weight, int)
    assert throttle_keys is None or isinstance(throttle_keys, tuple)
    if key is not None and _size(key) > FAIRNESS_KEY_BYTES_MAX:
        raise _InvalidResult(f"on_enqueue: fairness_key has {_size(key)} bytes, the limit is {FAIRNESS_KEY_BYTES_MAX}")
    if weight is not None and not 1 <= weight <= WEIGHT_MAX:
        raise _InvalidResult(f"on_enqueue: weight must be 1 to {WEIGHT_MAX}, got {weight}")
    if throttle_keys:
        throttle_keys = tuple(dict.fromkeys(throttle_keys))
        if len(throttle_keys) > THROTTLE_KEYS_MAX:
            raise _InvalidResult(f"on_enqueue: {len(throttle_keys)} throttle_keys, the limit is {THROTTLE_KEYS_MAX}")
        for throttle_key in throttle_keys:
            if not 1 <= _size(throttle_key) <= FAIRNESS_KEY_BYTES_MAX:
                raise _InvalidResult(f"on_enqueue: a throttle key must have 1 to {FAIRNESS_KEY_BYTES_MAX} bytes")
    return EnqueueAdvice(key, weight, throttle_keys)


def _failure_advice(row: tuple[Value, ...]) -> FailureAdvice:
    action, delay_ms = row
    assert action is None or isinstance(action, str)
    assert delay_ms is None or isinstance(delay_ms, int)
    if action is not None and action not in _ACTIONS:
        raise _InvalidResult(f"on_failure: action must be 'retry' or 'dlq', got {action[:40]!r}")
    if delay_ms is not None and not 0 <= delay_ms <= DURATION_MS_MAX:
        raise _InvalidResult(f"on_failure: delay_ms must be 0 to {DURATION_MS_MAX}, got {delay_ms}")
    return FailureAdvice(None if action is None else _ACTIONS[action], delay_ms)


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
