"""The sandbox against scripts that mean harm, and the promises it makes to those that do not."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from basaltmq.errors import InvalidArgumentError, ScriptError
from basaltmq.queues import lua
from basaltmq.queues.lua import (
    INPUT_BYTES_MAX,
    SOURCE_BYTES_MAX,
    STATE_VALUE_BYTES_MAX,
    LuaScript,
    ScriptFailure,
    ScriptLimits,
    ScriptShape,
    Value,
)
from basaltmq.queues.lua_patterns import PATTERNS

pytestmark = [pytest.mark.spec("C12"), pytest.mark.promise("P8")]

SHAPE = ScriptShape(
    "hook",
    (("queue", "string"), ("size", "integer")),
    (("text", "string"), ("number", "integer"), ("list", "strings")),
)


def script(body: str, **options: object) -> LuaScript:
    """With a CPU limit that a slow machine does not reach before the limit a test is about."""
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


ENDLESS = {
    "loop": "while true do end",
    "goto": "::again:: goto again",
    "for": "for i = 1, math.maxinteger do end",
    "pcall": "while true do pcall(function() while true do end end) end",
    "nested pcall": "local function f() while true do pcall(f) end end f()",
    "pcall of pcall": "while true do pcall(pcall, pcall, error) end",
    "xpcall handler": "xpcall(function() while true do end end, function() while true do end end)",
    "xpcall of error": "xpcall(error, function() while true do end end)",
    "xpcall recursive": "local function h(e) return xpcall(error, h) end while true do xpcall(error, h) end",
    "index": "local t = setmetatable({}, {__index = function() while true do end end}) local _ = t.x",
    "newindex": "local t = setmetatable({}, {__newindex = function() while true do end end}) t.x = 1",
    "call": "local t = setmetatable({}, {__call = function() while true do end end}) t()",
    "concat": "local t = setmetatable({}, {__concat = function() while true do end end}) local _ = t .. 'x'",
    "eq": "local m = {__eq = function() while true do end end} return setmetatable({}, m) == setmetatable({}, m)",
    "len": "local t = setmetatable({}, {__len = function() while true do end end}) local _ = #t",
    "tostring": "tostring(setmetatable({}, {__tostring = function() while true do end end}))",
    "format": "string.format('%s', setmetatable({}, {__tostring = function() while true do end end}))",
    "pairs": "for _ in pairs(setmetatable({}, {__pairs = function() while true do end end})) do end",
    "ipairs": "for _ in ipairs(setmetatable({}, {__index = function() return 1 end})) do end",
    "result": "return setmetatable({}, {__index = function() while true do end end})",
    "sort comparator": "local t = {} for i = 1, 50 do t[i] = i end table.sort(t, function() while true do end end)",
    "sort that lies": "local t = {} for i = 1, 9000 do t[i] = i end while true do table.sort(t, rawequal) end",
    "gsub callback": "string.gsub('aaa', 'a', function() while true do end end)",
    "gsub table": "string.gsub('aaa', 'a', setmetatable({}, {__index = function() while true do end end}))",
    "gmatch": "while true do for _ in string.gmatch('aaa', 'a') do end end",
    "state": "while true do fila.get(tostring(math.random())) end",
    "y combinator": "local function f(g) return g(g) end return f(f)",
    "mutual tail calls": "local a, b function a() return b() end function b() return a() end a()",
    "error loop": "while true do pcall(error, setmetatable({}, {__tostring = error})) end",
    "string method": "local s = 'x' while true do s:upper() end",
    "exponential": "local function f(n) if n > 0 then f(n - 1) f(n - 1) end end f(100)",
}


@pytest.mark.parametrize("body", ENDLESS.values(), ids=ENDLESS.keys())
def test_endless_work_ends_at_the_instruction_limit(body: str) -> None:
    assert fault(body).fault == "instructions"


C_LOOPS = {
    "move": "table.move({}, 1, math.maxinteger - 1, 2)",
    "move to a far place": "table.move({1}, 1, 1 << 40, 1)",
    "insert with a made-up length": "table.insert(setmetatable({}, {__len = function() return 1 << 50 end}), 1, 1)",
    "remove with a made-up length": "table.remove(setmetatable({}, {__len = function() return 1 << 50 end}), 1)",
    "sort with a made-up length": "table.sort(setmetatable({}, {__len = function() return 1 << 30 end}), rawequal)",
    "concat with a made-up length": "table.concat(setmetatable({}, {__len = function() return 1 << 50 end,"
    " __index = function() return '' end}))",
    "concat of a range": "table.concat({}, '', 1, math.maxinteger)",
    "unpack of a range": "table.unpack({}, 1, 1 << 40)",
    "unpack from the least to the largest": "table.unpack({}, math.mininteger, math.maxinteger)",
    "unpack with a made-up length": "table.unpack(setmetatable({}, {__len = function() return 1 << 50 end}))",
}


@pytest.mark.parametrize("body", C_LOOPS.values(), ids=C_LOOPS.keys())
def test_c_functions_cannot_be_made_to_loop(body: str) -> None:
    got = call(script(body))
    assert got == ("ok", None, None) or (isinstance(got, ScriptFailure) and got.fault == "error"), got


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
def test_patterns_cannot_backtrack_past_the_limit(body: str) -> None:
    assert fault(body).fault == "instructions"


MEMORY = {
    "table": "local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(1000) .. i end",
    "doubling": "local s = 'x' while true do s = s .. s end",
    "doubling in pcall": "local s = 'x' while true do pcall(function() s = s .. s end) end",
    "kept in a global": "keep = keep or {} for i = 1, 1e9 do keep[i] = ('x'):rep(1000) .. i end",
    "nested tables": "local t = {} for i = 1, 40000 do t = {t, t, t, {}, {}} end",
    "concat": "local t = {} for i = 1, 1000 do t[i] = ('x'):rep(2000) end return {text = table.concat(t)}",
    "gsub": "return {text = (('x'):rep(2000):gsub('x', ('y'):rep(2000)))}",
    "byte": "local s = ('x'):rep(1 << 20) return {number = select('#', s:byte(1, -1))}",
    "varargs": "local function f(...) return f(1, 2, 3, 4, 5, 6, 7, 8, 9, ...) end f()",
    "unpack": "local t = table.pack(table.unpack({}, 1, 150000)) return {number = t.n}",
    "closures": "local f for i = 1, 1e9 do local g, j = f, {} f = function() return g, j end end",
    "list": "local l = {} for i = 1, 100 do l[i] = ('x'):rep(50000) end return {list = l}",
    "format": "local s = ('x'):rep(500000) return {text = ('%s%s%s%s%s%s'):format(s, s, s, s, s, s)}",
    "array hole": "local t = {} for i = 1, 30 do t[1 << i] = ('x'):rep(200000) .. i end",
}


@pytest.mark.parametrize("body", MEMORY.values(), ids=MEMORY.keys())
def test_memory_bombs_end_at_the_memory_limit(body: str) -> None:
    target = script(body)
    for _ in range(3):
        got = call(target)
        assert isinstance(got, ScriptFailure)
        assert got.fault in ("memory", "instructions", "cpu") or "too" in got.text, got
        assert target.memory_bytes < 3 << 20


@pytest.mark.parametrize(
    "body",
    [
        "return {text = ('x'):rep(1 << 40)}",
        "return {text = ('x'):rep(math.maxinteger)}",
        "return {text = ('x'):rep(1 << 20, ('y'):rep(1000))}",
        "return {text = ('%99999999d'):format(1)}",
        "return {text = ('%.99999f'):format(1)}",
    ],
)
def test_oversized_strings_are_refused_before_they_are_made(body: str) -> None:
    got = fault(body)
    assert got.fault == "error"
    assert "too large" in got.text or "invalid conversion" in got.text


RECURSION = {
    "lua": "local function f() return 1 + f() end f()",
    "metamethod": "local m = {} m.__index = function(t, k) return setmetatable({}, m)[k] end "
    "return setmetatable({}, m).x",
    "index chain": "local t = {} for i = 1, 3000 do t = setmetatable({}, {__index = t}) end return {text = t.x}",
    "pcall": "local function f() local _, e = pcall(f) if e then error(e, 0) end end f()",
    "tostring": "local m = {} m.__tostring = function(t) return tostring(t) end tostring(setmetatable({}, m))",
    "gsub": "local function f() return (('a'):gsub('a', f)) end f()",
    "sort": "local function f(a, b) table.sort({1, 2, 3}, f) end f()",
    "concat": "local m = {} m.__concat = function(a, b) return a .. b end local _ = setmetatable({}, m) .. 'x'",
    "ipairs": "local m = {} m.__index = function(t, i) for _ in ipairs(t) do end end "
    "for _ in ipairs(setmetatable({}, m)) do end",
}


@pytest.mark.parametrize("body", RECURSION.values(), ids=RECURSION.keys())
def test_deep_recursion_ends_in_an_error(body: str) -> None:
    got = call(script(body))
    assert got == (None, None, None) or (
        isinstance(got, ScriptFailure) and got.fault in ("error", "memory", "instructions")
    ), got


@pytest.mark.parametrize("unit", ["(", "{", "-", "not ", "a.b(", "function() ", "do ", "a[", "1 .. ", "x = x == "])
def test_deep_nesting_in_the_source_is_refused(unit: str) -> None:
    with pytest.raises(ScriptError):
        LuaScript("return " + unit * (60_000 // len(unit)), SHAPE)


SLOW_INSTRUCTIONS = {
    "concat": "local s = ('x'):rep(500000) while true do local _ = s .. 'y' end",
    "compare": "local a, b = ('x'):rep(400000) .. 'a', ('x'):rep(400000) .. 'b' while true do local _ = a < b end",
    "sort of long strings": "local a, b, t = ('x'):rep(400000) .. 'a', ('x'):rep(400000) .. 'a', {} "
    "for i = 1, 3000 do t[i] = i % 2 == 0 and a or b end table.sort(t)",
    "colliding keys": "local t = {} for i = 1, 9000 do t[i << 40] = 1 end "
    "while true do for i = 1, 9000 do local _ = t[i << 40] end end",
    "varargs": "local function f(...) while true do local _ = select(30000, ...) end end f(table.unpack({}, 1, 30000))",
}


@pytest.mark.parametrize("body", SLOW_INSTRUCTIONS.values(), ids=SLOW_INSTRUCTIONS.keys())
def test_instructions_that_each_cost_much_end_at_the_cpu_limit(body: str) -> None:
    target = script(body, limits=ScriptLimits(instructions_max=1_000_000_000))
    got = call(target)
    assert isinstance(got, ScriptFailure)
    assert got.fault == "cpu"


ABSENT = """
load loadstring loadfile dofile require package io os debug coroutine collectgarbage print python warn
string.dump string.pack string.unpack string.packsize math.randomseed newproxy setfenv getfenv module
python.eval python.builtins python.as_attrgetter
"""


@pytest.mark.parametrize("name", ABSENT.split())
def test_nothing_that_reaches_outside_exists(name: str) -> None:
    first, _, second = name.partition(".")
    path = f"{first} and {first}.{second}" if second else first
    assert result(f"return {{text = type({path})}}") in (("nil", None, None), ("boolean", None, None))
    assert result(f"local v = {path} return {{text = tostring(v)}}")[0] in ("nil", "false")


PRESENT = """
.assert .error .fila.get .getmetatable .hook .ipairs .next .pairs .pcall .rawequal .rawget .rawlen .rawset
.select .setmetatable .tonumber .tostring .type .xpcall
.string.byte .string.char .string.find .string.format .string.gmatch .string.gsub .string.len .string.lower
.string.match .string.rep .string.reverse .string.sub .string.upper
.table.concat .table.insert .table.move .table.pack .table.remove .table.sort .table.unpack
.utf8.char .utf8.codepoint .utf8.codes .utf8.len .utf8.offset
.math.abs .math.acos .math.asin .math.atan .math.ceil .math.cos .math.deg .math.exp .math.floor .math.fmod
.math.log .math.max .math.min .math.modf .math.rad .math.random .math.sin .math.sqrt .math.tan
.math.tointeger .math.type .math.ult
"""


def test_every_reachable_value_is_one_that_was_put_there() -> None:
    """Walks all tables reachable from the globals, the string metatable and the message."""
    body = """
    local seen, found = {}, {}
    local function walk(value, path, depth)
        local kind = type(value)
        if kind == 'userdata' or kind == 'thread' then found[#found + 1] = path .. ':' .. kind end
        if kind == 'function' then found[#found + 1] = path end
        if kind ~= 'table' or seen[value] then return end
        seen[value] = true
        for k, v in next, value do walk(v, path .. '.' .. tostring(k), depth + 1) end
        local meta = getmetatable(value)
        if meta then walk(meta, path .. '<meta>', depth + 1) end
    end
    walk(_G, '', 0) walk(getmetatable(''), 'string meta', 0) walk(msg, 'msg', 0)
    table.sort(found)
    return {list = found}
    """
    names = result(body)[2]
    assert isinstance(names, tuple)
    assert sorted(names) == sorted(PRESENT.split())


@pytest.mark.parametrize("field", ["__gc", "__mode", "__close"])
def test_metamethods_that_run_unwatched_are_refused(field: str) -> None:
    got = fault(f"setmetatable({{}}, {{{field} = 'k'}})")
    assert "not available" in got.text


@pytest.mark.parametrize("field", ["__gc", "__close"])
def test_metamethods_that_run_unwatched_cannot_be_added_afterwards(field: str) -> None:
    body = f"""
    local meta = {{}}
    for i = 1, 100 do
        local t = setmetatable({{}}, meta)
        meta.{field} = function() while true do end end
        local same = getmetatable(t) == meta
        meta.{field} = nil
    end
    local t = setmetatable({{}}, meta)
    meta.{field} = function() escaped = true end
    t = nil
    for i = 1, 2000 do local _ = {{i}} end
    return {{text = tostring(escaped)}}
    """
    assert result(body) == ("nil", None, None)


def test_a_variable_to_be_closed_has_nothing_to_call() -> None:
    got = fault("local meta = {} local t = setmetatable({}, meta) meta.__close = function() end local c <close> = t")
    assert "non-closable value" in got.text


def test_metatables_work_for_ordinary_uses() -> None:
    body = """
    local Point = {} Point.__index = Point
    Point.__add = function(a, b) return Point.make(a.x + b.x) end
    Point.__tostring = function(p) return 'point ' .. p.x end
    Point.__name = 'Point'
    function Point.make(x) return setmetatable({x = x}, Point) end
    local sealed = setmetatable({}, {__metatable = 'sealed'})
    assert(getmetatable(sealed) == 'sealed')
    assert(not pcall(setmetatable, sealed, {}))
    assert(getmetatable(Point.make(1)) == Point)
    assert(getmetatable('') == nil and getmetatable(1) == nil)
    return {text = tostring(Point.make(1) + Point.make(2))}
    """
    assert result(body)[0] == "point 3"


def test_tampering_with_libraries_stays_in_the_script_that_did_it() -> None:
    vandal = script(
        "string.rep = nil string.upper = function() return 'mine' end table = nil _G.pairs = nil "
        "return {text = ('x'):upper()}"
    )
    assert call(vandal) == ("mine", None, None)
    other = script("return {text = ('x'):upper() .. ('y'):rep(2) .. type(table) .. type(pairs)}")
    assert call(other) == ("XyytableFunction".replace("F", "f"), None, None)


def test_tampering_does_not_reach_the_trusted_side() -> None:
    body = """
    local all, pairs = _G, pairs
    for _, library in pairs({string, table, math, utf8, fila}) do
        for name in pairs(library) do library[name] = function() while true do end end end
    end
    for name in pairs(all) do if name ~= 'hook' then all[name] = nil end end
    return {text = msg.queue, number = msg.size, list = {'a', 'b'}}
    """
    assert result(body) == ("q", 7, ("a", "b"))


def test_limit_errors_cannot_be_caught() -> None:
    body = "local ok = pcall(function() while true do end end) survived = true return {text = 'survived'}"
    assert fault(body).fault == "instructions"
    memory = "local ok = pcall(function() local s = 'x' while true do s = s .. s end end) return {text = 'survived'}"
    assert fault(memory).fault == "memory"


def test_many_closures_waiting_to_catch_the_limit_do_not_prolong_it() -> None:
    body = """
    local function nest(n)
        if n == 0 then while true do end end
        pcall(nest, n - 1)
        while true do end
    end
    nest(90)
    """
    assert fault(body).fault == "instructions"


def test_pcall_nests_to_a_limit_that_an_error_does_not_move() -> None:
    body = """
    local depth, deepest = 0, 0
    local function f()
        depth = depth + 1
        if depth > deepest then deepest = depth end
        for i = 1, 2 do if deepest < 150 then pcall(f) end end
        depth = depth - 1
        error('up')
    end
    pcall(f)
    for i = 1, 1000 do pcall(error, 'x') pcall(type, 'x') end
    return {number = deepest}
    """
    target = script(body, limits=ScriptLimits(instructions_max=1_000_000_000, cpu_ms_max=1))
    assert isinstance(call(target), ScriptFailure), "two calls at each of 100 levels never end"
    assert result(body.replace("1, 2", "1, 1")) == (None, 100, None)


def test_errors_do_not_show_addresses_paths_or_python() -> None:
    for body in (
        "error({})",
        "error(function() end)",
        "error()",
        "local x = nil + 1",
        "string.rep()",
        "fila.get({})",
        "fila.get('boom')",
        "error(setmetatable({}, {__tostring = function() return 'x' end}))",
        "return 5",
        "return {text = {}}",
    ):
        target = script(body, read_state=lambda key: 1 // 0)
        got = call(target)
        assert isinstance(got, ScriptFailure)
        assert got.fault == "error"
        for leak in ("0x", "Traceback", "lupa", "ZeroDivision", ".py", "<python>", "stack traceback"):
            assert leak not in got.text, got.text
    shown = result("return {text = tostring({}) .. tostring(print) .. tostring(pcall) .. ('%s'):format({})}")
    assert shown[0] == "tablenilfunctiontable"
    assert "not available" in fault("return {text = ('%p'):format({})}").text
    assert result("return {text = ('100%%p'):format()}")[0] == "100%p"


def test_error_text_is_one_bounded_line() -> None:
    got = fault("error(('x\\n\\0\\27[31m'):rep(1000))")
    assert len(got.text) <= 600
    assert got.text.isprintable()


def test_errors_name_the_line() -> None:
    assert fault("\n\nlocal x = msg.nothing.here").text.startswith("hook:4:")
    with pytest.raises(ScriptError, match=r"hook does not compile at line 3.*near 'end'"):
        LuaScript("function hook(msg)\n local x =\n end", SHAPE)
    with pytest.raises(ScriptError, match="over the limit of 100000 instructions"):
        LuaScript("while true do end", SHAPE)
    with pytest.raises(ScriptError, match="over the limit of 2097152 bytes of memory"):
        LuaScript("local s = 'x' while true do s = s .. s end", SHAPE)
    with pytest.raises(ScriptError, match=r"hook:2: boom"):
        LuaScript("\nerror('boom')", SHAPE)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("x = 1", r"defines no function hook\(msg\)"),
        ("hook = 5", "defines no function"),
        ("\x1bLua\x54\x00", "does not compile"),
        ("--" + "x" * SOURCE_BYTES_MAX, "over the limit"),
        ("function hook(msg) return \ud800 end", "not Unicode"),
    ],
)
def test_unusable_sources_are_refused(source: str, problem: str) -> None:
    with pytest.raises(ScriptError, match=problem):
        LuaScript(source, SHAPE)


def test_a_source_that_is_not_text_and_limits_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a script is text"):
        LuaScript(b"x", SHAPE)  # type: ignore[arg-type]
    for options in ({"instructions_max": 0}, {"memory_bytes_max": 10}, {"cpu_ms_max": 0}, {"cpu_ms_max": True}):
        with pytest.raises(InvalidArgumentError, match=next(iter(options))):
            ScriptLimits(**options)


def test_the_function_may_be_returned_instead_of_named() -> None:
    assert call(LuaScript("return function(msg) return {text = msg.queue} end", SHAPE)) == ("q", None, None)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return 5", "hook must return a table, got number"),
        ("return {text = {}}", "text must be a string, got table"),
        ("return {text = true}", "text must be a string, got boolean"),
        ("return {number = '5'}", "number must be a whole number, got string"),
        ("return {number = 1.5}", "number must be a whole number, got 1.5"),
        ("return {number = 0/0}", "number must be a whole number, got -?nan"),
        ("return {number = 1e300}", "number must be a whole number, got 1e"),
        ("return {list = 'a'}", "list must be a list of strings, got string"),
        ("return {list = {a = 'b'}}", "list must be a list of strings, got a table with other keys"),
        ("return {list = {'a', {}}}", r"list\[2\] must be a string, got table"),
        ("return {text = '\\xff'}", "not UTF-8"),
        ("return {list = {'\\xff'}}", "not UTF-8"),
    ],
)
def test_results_of_the_wrong_type_are_named(body: str, problem: str) -> None:
    got = fault(body)
    assert re.search(problem, got.text), got


def test_results_and_messages_round_trip() -> None:
    assert result("return nil") == (None, None, None)
    assert result("return") == (None, None, None)
    assert result("return {}") == (None, None, None)
    assert result("return {text = 12, number = 3.0, list = {'a', 5}}") == ("12", 3, ("a", "5"))
    assert result("return {list = {}}") == (None, None, ())
    assert result("return setmetatable({}, {__index = {number = 4}})") == (None, 4, None)
    headers = {"a": "ä€", "": "empty name", "empty": "", "nul\0": "\0\1"} | {str(i): "v" * i for i in range(130)}
    body = """
    local n = 0
    for name, value in pairs(msg.headers) do
        n = n + 1
        if tonumber(name) then assert(#value == tonumber(name)) end
    end
    return {text = msg.headers.a .. msg.headers[''] .. msg.headers['nul\\0'] .. msg.headers.empty, number = n}
    """
    assert result(body, headers) == ("ä€empty name\0\1", 134, None)


def test_a_run_stops_at_the_failed_record_and_goes_on_behind_it() -> None:
    target = script("if msg.size == 3 then error('three') end return {number = msg.size}")
    records = [target.encode_record(("q", i), {}) for i in range(6)]
    rows, failure = target.run(records)
    assert [row[1] for row in rows] == [0, 1, 2]
    assert failure is not None
    assert failure.text == "hook:2: three"
    rows, failure = target.run(records[4:])
    assert [row[1] for row in rows] == [4, 5]
    assert failure is None


def test_rows_before_a_limit_are_kept() -> None:
    target = script("if msg.size == 3 then while true do end end return {number = msg.size}")
    rows, failure = target.run([target.encode_record(("q", i), {}) for i in range(6)])
    assert [row[1] for row in rows] == [0, 1, 2]
    assert failure is not None
    assert failure.fault == "instructions"


def test_the_budget_is_per_record() -> None:
    target = script("for i = 1, 20000 do end return {number = 1}")
    rows, failure = target.run([target.encode_record(("q", i), {}) for i in range(50)])
    assert failure is None
    assert len(rows) == 50
    slow = script(
        "for i = 1, 20000 do end return {number = 1}", limits=ScriptLimits(cpu_ms_max=100, instructions_max=10**9)
    )
    rows, failure = slow.run([slow.encode_record(("q", i), {}) for i in range(1500)])
    assert failure is None, "neither is the CPU time of the records before"


def test_taking_a_message_apart_is_not_charged_to_the_script() -> None:
    target = script("return {number = 1}", limits=ScriptLimits(instructions_max=1000))
    assert call(target, {str(number): "x" for number in range(1024)}) == (None, 1, None)


def test_more_records_than_fit_one_call_are_all_run() -> None:
    target = script("return {number = msg.size, text = tostring(#msg.headers.h)}")
    large = "x" * (INPUT_BYTES_MAX // 3)
    records = [target.encode_record(("q", i), {"h": large}) for i in range(20)]
    records.append(target.encode_record(("q", 20), {"h": "y" * (1 << 20)}))
    rows, failure = target.run(records)
    assert failure is None
    assert [row[1] for row in rows] == list(range(21))
    assert rows[20][0] == str(1 << 20)
    assert target.run([]) == ([], None)


def test_state_lives_between_calls_until_a_limit_is_hit() -> None:
    target = script("count = (count or 0) + 1 if msg.headers.burn then while true do end end return {number = count}")
    assert [call(target), call(target)] == [(None, 1, None), (None, 2, None)]
    assert isinstance(call(target, {"burn": "1"}), ScriptFailure)
    assert call(target) == (None, 1, None)
    target.release()
    assert target.memory_bytes == 0
    assert call(target) == (None, 1, None)


def test_a_script_that_hoards_is_restarted_not_starved() -> None:
    target = script("keep = keep or {} keep[#keep + 1] = ('x'):rep(100000) .. #keep return {number = #keep}")
    counts = []
    for _ in range(60):
        row = call(target)
        assert isinstance(row, tuple)
        assert isinstance(row[1], int)
        counts.append(row[1])
    assert max(counts) < 25


def test_filling_memory_to_the_brim_does_not_abort_the_process() -> None:
    """Lua aborts when a push finds no memory: run apart, because a failure would end this process."""
    code = """
from tests.unit.queues.test_lua import *
for step in (1, 41, 1000, 30000):
    body = f"keep = keep or {{}} pcall(function() for i = 1, 1e9 do keep[#keep + 1] = ('x'):rep({step}) .. i end end)"
    target = LuaScript("keep = {} function hook(msg) " + body + " end", SHAPE,
                       limits=ScriptLimits(instructions_max=10_000_000, cpu_ms_max=5000))
    assert call(target).fault == "memory"
    nearly = LuaScript("keep = {} function hook(msg) for i = 1, 200 do keep[#keep + 1] = ('x'):rep(" + str(step) +
                       ") .. #keep end fila.get('k') end", SHAPE, read_state=lambda key: "v" * 60000)
    for _ in range(120):
        call(nearly, {"h": "x" * 1000})
full = LuaScript("function hook(msg) local t, n = {}, tonumber(msg.headers.n) "
                 "for i = 1, n do t[i] = ('x'):rep(1000) .. i end "
                 "fila.get('k') return {number = #t} end", SHAPE, read_state=lambda key: "v" * 60000,
                 limits=ScriptLimits(instructions_max=10_000_000, cpu_ms_max=5000))
faults = set()
for n in range(1500, 2100, 4):
    got = call(full, {"n": str(n)})
    faults.add(got.text.split(": ")[-1] if isinstance(got, ScriptFailure) else "")
assert len(faults) == 3, faults  # fits, the value does not, the strings do not
print("alive")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={"PYTHONPATH": "src:."}
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_state_is_read_once_per_call_and_shown_as_text() -> None:
    asked: list[str] = []

    def read(key: str) -> str | None:
        asked.append(key)
        return {"a": "1", "ü": "ä"}.get(key)

    target = script(
        "return {text = tostring(fila.get('a')) .. tostring(fila.get('ü')) .. tostring(fila.get('no'))}",
        read_state=read,
    )
    rows, failure = target.run([target.encode_record(("q", i), {}) for i in range(5)])
    assert failure is None
    assert rows == [("1änil", None, None)] * 5
    assert asked == ["a", "ü", "no"]
    call(target)
    assert asked == ["a", "ü", "no"] * 2


@pytest.mark.parametrize(
    "body",
    [
        "return {text = select(2, pcall(fila.get, 'a'))}",
        "return {text = (('x'):gsub('x', function() return fila.get('a') end))}",
        "local t = {2, 1} local v table.sort(t, function(x, y) v = fila.get('a') return x < y end) return {text = v}",
        "return {text = setmetatable({}, {__index = function() return fila.get('a') end}).x}",
        "return setmetatable({}, {__index = function(_, k) return k == 'text' and fila.get('a') or nil end})",
    ],
)
def test_state_can_be_read_from_callbacks(body: str) -> None:
    assert call(script(body, read_state=lambda key: "value")) == ("value", None, None)


def test_reading_state_is_work() -> None:
    asked: list[str] = []
    target = script("for i = 1, 1e9 do fila.get('k' .. i) end", read_state=asked.append)
    assert isinstance(call(target), ScriptFailure)
    assert len(asked) <= 200


def test_state_at_the_top_level_of_the_script() -> None:
    target = LuaScript(
        "local a = fila.get('a') function hook() return {text = a} end", SHAPE, read_state=lambda key: key
    )
    assert call(target) == ("a", None, None)


def test_state_where_it_cannot_be_given_is_an_error_not_a_hang() -> None:
    got = call(script("for _ in ipairs(setmetatable({}, {__index = function() return fila.get('a') end})) do end"))
    assert isinstance(got, ScriptFailure)
    assert "cannot be called inside an iterator" in got.text
    for value in ("x" * (STATE_VALUE_BYTES_MAX + 1), 5):
        got = call(script("fila.get('a')", read_state=lambda key, value=value: value))
        assert isinstance(got, ScriptFailure)
        assert "cannot be read" in got.text


def test_an_interrupt_while_reading_state_leaves_a_usable_script() -> None:
    calls = 0

    def read(key: str) -> str | None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt
        return "fine"

    target = script("return {text = fila.get('a')}", read_state=read)
    with pytest.raises(KeyboardInterrupt):
        call(target)
    assert call(target) == ("fine", None, None)


def test_random_numbers_follow_the_seed() -> None:
    body = "return {number = math.random(1 << 40)}"
    assert call(script(body, seed=5)) == call(script(body, seed=5))
    assert call(script(body, seed=5)) != call(script(body, seed=6))


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


def test_cheap_matches_are_charged_by_their_worst_case() -> None:
    body = "local s = ('a'):rep(80) for i = 1, 1000 do s:find('.-b') end return {number = 1}"
    assert fault(body).fault == "instructions", "the loop alone would stay far below the limit"


def test_an_anchor_makes_gmatch_no_cheaper() -> None:
    assert fault("for _ in (('^'):rep(8000)):gmatch('^^*b') do end").fault == "instructions"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60))
def test_sort_sorts_and_keeps_equals_in_order(numbers: list[int]) -> None:
    body = """
    local t, by = {}, {}
    for n in msg.headers.n:gmatch('%d+') do t[#t + 1] = tonumber(n) by[#by + 1] = {tonumber(n) // 10, #by} end
    table.sort(t)
    table.sort(by, function(a, b) return a[1] > b[1] end)
    local out = {}
    for i, pair in ipairs(by) do out[i] = pair[1] .. ':' .. pair[2] end
    return {text = table.concat(t, ' '), list = out}
    """
    by = sorted(((n // 10, i) for i, n in enumerate(numbers)), key=lambda pair: -pair[0])
    expected = (" ".join(map(str, sorted(numbers))), None, tuple(f"{n}:{i}" for n, i in by))
    assert result(body, {"n": " ".join(map(str, numbers))}) == expected


def test_table_and_string_functions_behave_like_stock_ones() -> None:
    body = """
    local t = {1, 2, 3}
    table.insert(t, 4) table.insert(t, 1, 0) assert(table.concat(t, ',') == '0,1,2,3,4')
    assert(table.remove(t) == 4 and table.remove(t, 1) == 0 and table.remove({}) == nil and table.remove({}, 0) == nil)
    assert(#t == 3 and table.remove(t, 4) == nil and not pcall(table.remove, t, 9) and not pcall(table.insert, t, 9, 1))
    assert(table.concat(table.move({1, 2, 3}, 1, 3, 2), ',') == '1,1,2,3')
    assert(table.concat(table.move({1, 2}, 1, 2, 1, {9, 9, 9}), ',') == '1,2,9')
    assert(select('#', table.unpack({1, nil, 3}, 1, 3)) == 3 and table.pack(1, nil).n == 2)
    assert((''):rep(math.maxinteger) == '' and (''):rep(math.maxinteger, '') == '')
    assert(('abc'):rep(2, '-') == 'abc-abc' and ('x'):rep(0) == '' and ('x'):rep(-1) == '' and (5 .. ''):rep(2) == '55')
    assert(('abc'):sub(2) == 'bc' and ('abc'):sub(-2, -2) == 'b' and ('abc'):byte(2) == 98 and #('abc') == 3)
    assert(table.concat({('abc'):byte(1, -1)}, ',') == '97,98,99' and select('#', ('abc'):byte(-9, 9)) == 3)
    assert(select('#', ('abc'):byte(9)) == 0 and select('#', ('abc'):byte(3, 1)) == 0 and ('abc'):byte() == 97)
    assert(('%5.2f|%d|%s|%q|%x'):format(1.234, 5, 'a', 'b', 255) == ' 1.23|5|a|"b"|ff')
    assert(('a.b'):find('.', 1, true) == 2 and ('abc'):find('c', -1) == 3 and ('abc'):find('a', 10) == nil)
    assert(('abc'):find('', 4) == 4 and ('abc'):find('') == 1)
    assert('10' + 5 == 15 and 10 .. '' == '10' and utf8.len('ä') == 1 and utf8.char(228) == 'ä')
    assert(tostring(nil) == 'nil' and tostring(1.5) == '1.5' and tonumber('0x10') == 16 and tonumber('z', 36) == 35)
    assert(select(2, pcall(error, {1}))[1] == 1)
    assert(select(2, xpcall(error, function(e) return e .. '!' end, 'a')) == 'a!')
    assert(math.type(3) == 'integer' and math.tointeger(3.0) == 3 and 7 // 2 == 3 and 1 << 4 == 16)
    for i = 1, 3 do if i == 2 then goto continue end t[i] = 0 ::continue:: end
    return {text = 'all'}
    """
    assert result(body)[0] == "all"
