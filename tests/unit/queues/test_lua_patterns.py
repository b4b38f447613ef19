"""Pattern functions: same results as stock Lua, with bounded time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.queues.lua_scripts import call, fault, script

from basaltmq.queues.scripts import sandbox as lua
from basaltmq.queues.scripts.sandbox import (
    PATTERNS,
    LuaScript,
    ScriptLimits,
)

pytestmark = [pytest.mark.spec("C12"), pytest.mark.promise("P8")]


BACKTRACKING = {
    "find": "return {text = string.find(('a'):rep(30000), ('.-'):rep(30) .. 'b')}",
    "match": "string.match(('a'):rep(10000), ('a*'):rep(30) .. 'b')",
    "gmatch": "for _ in string.gmatch(('a'):rep(10000), '^' .. ('.-'):rep(6) .. 'b') do end",
    "gsub": "string.gsub(('a'):rep(10000), ('a+'):rep(20) .. 'b', '')",
    "optional": "string.match(('a'):rep(40), ('a?'):rep(60) .. ('a'):rep(60))",
    "balance": "string.find(('('):rep(100000), '%b()')",
    "back references": "string.find(('a'):rep(5000), '(.*)%1(.*)%2(.*)%3b')",
    "sets": "string.find(('a'):rep(90), ('[' .. ('b-c'):rep(60) .. 'a]*'):rep(3) .. 'x')",
    "method": "local s = ('a'):rep(10000) s:find(('.-'):rep(20) .. 'b')",
    "small but many": "local s = ('a'):rep(80) while true do s:match('.-.-b') end",
    "plain find, needle almost there": "local h, n = ('a'):rep(500000), ('a'):rep(100000) .. 'b' "
    "while true do h:find(n, 1, true) end",
}


@pytest.mark.parametrize("body", BACKTRACKING.values(), ids=BACKTRACKING.keys())
def test_pattern_backtracking_is_limited(body: str) -> None:
    assert fault(body).fault == "instructions"


_COMPARE = """
local subject, pattern, with = msg.headers.s, msg.headers.p, msg.headers.r
local function show(...)
    local out = table.pack(...)
    for i = 1, out.n do out[i] = tostring(out[i]) end
    return table.concat(out, '|')
end
local function try(f, ...)
    local out = table.pack(pcall(f, ...))
    if not out[1] then return 'error' end
    return show(table.unpack(out, 2, out.n))
end
local all = {try(string.find, subject, pattern), try(string.match, subject, pattern, -3),
    try(string.gsub, subject, pattern, with),
    try(string.gsub, subject, pattern, function(c) return #tostring(c) end, 2)}
local ok, found = pcall(function()
    local list = {}
    for a, b in string.gmatch(subject, pattern) do list[#list + 1] = show(a, b) end
    return table.concat(list, ';')
end)
all[#all + 1] = ok and found or 'error'
return {list = all}
"""

_ATOMS = [
    "a",
    "b",
    ".",
    "%a",
    "%A",
    "%d",
    "%s",
    "[ab]",
    "[^a]",
    "[a-c%d]",
    "[]]",
    "[^]%w]",
    "%%",
    "%.",
    "x",
    "-",
    "^",
    "$",
]
_PIECES = st.sampled_from(
    [atom + quantifier for atom in _ATOMS for quantifier in ("", "*", "+", "-", "?")]
    + ["()", "(", ")", "%1", "%b()", "%bab", "%f[%w]", "%f[^a]", "%", "[", "%f", "%b", "%9", "(a*)", "(.-)", "(%a+)"]
)


@functools.cache
def stock_patterns() -> Callable[[bytes, bytes, bytes], bytes]:
    body = _COMPARE.replace("return {list = all}", "return table.concat(all, '\\1')")
    code = f"local s, p, r = ... local msg = {{headers = {{s = s, p = p, r = r}}}} {body}"
    runtime = importlib.import_module("lupa.lua54").LuaRuntime(encoding=None)
    return cast(Callable[[bytes, bytes, bytes], bytes], runtime.compile(code))


@functools.cache
def guarded_patterns(fast_steps_max: int) -> LuaScript:
    line = b"local fast_steps_max = 8192"
    assert line in PATTERNS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lua, "PATTERNS", PATTERNS.replace(line, b"local fast_steps_max = %d" % fast_steps_max))
        return script(_COMPARE, limits=ScriptLimits(instructions_max=10_000_000, cpu_ms_max=10_000))


@settings(max_examples=600, deadline=None)
@example("", "()%1", "")
@example("aa", "()a%1", "%1")
@given(
    st.text(alphabet="aabbcxyz01 ()%.-^", max_size=14),
    st.lists(_PIECES, max_size=6).map("".join),
    st.sampled_from(["", "r", "%0", "%1%1", "%%", "<%0>", "%", "%9"]),
)
def test_pattern_functions_agree_with_stock_lua(subject: str, pattern: str, with_text: str) -> None:
    expected = tuple(stock_patterns()(subject.encode(), pattern.encode(), with_text.encode()).decode().split("\1"))
    for fast_steps_max in (0, 8192):
        got = call(guarded_patterns(fast_steps_max), {"s": subject, "p": pattern, "r": with_text})
        assert got == (None, None, expected), f"fast_steps_max {fast_steps_max}"


def test_matches_are_charged_by_their_worst_case() -> None:
    body = "local s = ('a'):rep(80) for i = 1, 1000 do s:find('.-b') end return {number = 1}"
    assert fault(body).fault == "instructions", "the loop alone stays far below the limit"


def test_anchored_gmatch_is_charged_like_others() -> None:
    assert fault("for _ in (('^'):rep(8000)):gmatch('^^*b') do end").fault == "instructions"
