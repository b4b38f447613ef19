"""The Lua sandbox with malicious scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.queues.lua_scripts import SHAPE, call, fault, result, script

from basaltmq.errors import ScriptError
from basaltmq.queues.scripts.sandbox import (
    LuaScript,
    ScriptFailure,
    ScriptLimits,
)

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.spec("C12"), pytest.mark.promise("P8")]


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
def test_infinite_loop_ends_at_the_instruction_limit(body: str) -> None:
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
def test_oversized_strings_are_refused_before_allocation(body: str) -> None:
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
def test_expensive_instructions_end_at_the_cpu_limit(body: str) -> None:
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
def test_no_function_reaches_outside_the_sandbox(name: str) -> None:
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


def test_every_reachable_value_is_allowed() -> None:
    """Walk all tables reachable from the globals, the string metatable and the message."""
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
def test_unmetered_metamethods_are_refused(field: str) -> None:
    got = fault(f"setmetatable({{}}, {{{field} = 'k'}})")
    assert "not available" in got.text


@pytest.mark.parametrize("field", ["__gc", "__close"])
def test_unmetered_metamethods_cannot_be_added_later(field: str) -> None:
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


def test_to_be_closed_variables_call_nothing() -> None:
    got = fault("local meta = {} local t = setmetatable({}, meta) meta.__close = function() end local c <close> = t")
    assert "non-closable value" in got.text


def test_library_changes_stay_within_their_script() -> None:
    vandal = script(
        "string.rep = nil string.upper = function() return 'mine' end table = nil _G.pairs = nil "
        "return {text = ('x'):upper()}"
    )
    assert call(vandal) == ("mine", None, None)
    other = script("return {text = ('x'):upper() .. ('y'):rep(2) .. type(table) .. type(pairs)}")
    assert call(other) == ("XyytableFunction".replace("F", "f"), None, None)


def test_library_changes_do_not_affect_trusted_code() -> None:
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


def test_nested_pcalls_do_not_extend_the_limit() -> None:
    body = """
    local function nest(n)
        if n == 0 then while true do end end
        pcall(nest, n - 1)
        while true do end
    end
    nest(90)
    """
    assert fault(body).fault == "instructions"


def test_pcall_nesting_limit_is_unchanged_by_errors() -> None:
    body = """
    local depth, deepest = 0, 0
    local function f()
        depth = depth + 1
        if depth > deepest then deepest = depth end
        for i = 1, 2 do pcall(f) end
        depth = depth - 1
        error('up')
    end
    pcall(f)
    for i = 1, 1000 do pcall(error, 'x') pcall(type, 'x') end
    return {number = deepest}
    """
    target = script(body, limits=ScriptLimits(instructions_max=1_000_000_000, cpu_ms_max=1))
    assert isinstance(call(target), ScriptFailure), "two calls at each of 100 levels do not end"
    assert result(body.replace("1, 2", "1, 1")) == (None, 100, None)


def test_errors_hide_addresses_paths_and_python_names() -> None:
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


def test_exhausted_memory_does_not_abort_the_process() -> None:
    """Lua aborts the process if a push has no memory, so this runs in a child process."""
    code = """
from tests.unit.queues.lua_scripts import *
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
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": f"{ROOT}/src:{ROOT}"},
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
