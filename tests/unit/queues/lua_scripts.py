"""Lua scripts for tests, and helpers that call a script once."""

from __future__ import annotations

from basaltmq.queues.scripts.sandbox import LuaScript, ScriptFailure, ScriptLimits, ScriptShape, Value

SHAPE = ScriptShape(
    "hook",
    (("queue", "string"), ("size", "integer")),
    (("text", "string"), ("number", "integer"), ("list", "strings")),
)


def script(body: str, **options: object) -> LuaScript:
    """Return limits with a CPU limit so high that a slow machine reaches the tested limit first."""
    options = {"limits": ScriptLimits(cpu_ms_max=10_000)} | options
    return LuaScript(f"function hook(msg)\n{body}\nend", SHAPE, **options)  # type: ignore[arg-type]


def call(target: LuaScript, headers: dict[str, str] | None = None) -> tuple[Value, ...] | ScriptFailure:
    rows, failure = target.run([target.encode_record(("q", 7), headers or {})])
    return rows[0] if failure is None else failure


def result(body: str, headers: dict[str, str] | None = None) -> tuple[Value, ...]:
    got = call(script(body), headers)
    assert not isinstance(got, ScriptFailure), got
    return got


def fault(body: str) -> ScriptFailure:
    target = script(body)
    got = call(target)
    assert isinstance(got, ScriptFailure), got
    again = target.run([target.encode_record(("q", 7), {})])[1]
    assert again is not None
    assert again.fault == got.fault, "a failed script can be called again"
    return got
