"""The Lua sandbox with benign scripts."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.queues.lua_scripts import SHAPE, call, fault, result, script

from basaltmq.errors import InvalidArgumentError, ScriptError
from basaltmq.queues.scripts.sandbox import (
    INPUT_BYTES_MAX,
    SOURCE_BYTES_MAX,
    STATE_VALUE_BYTES_MAX,
    LuaScript,
    ScriptFailure,
    ScriptLimits,
)

pytestmark = [pytest.mark.spec("C12"), pytest.mark.promise("P8")]


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


def test_error_text_is_one_bounded_line() -> None:
    got = fault("error(('x\\n\\0\\27[31m'):rep(1000))")
    assert len(got.text) <= 600
    assert got.text.isprintable()


def test_script_errors_name_the_line() -> None:
    assert fault("\n\nlocal x = msg.nothing.here").text.startswith("hook:4:")
    with pytest.raises(ScriptError, match=r"hook does not compile at line 3.*near 'end'"):
        LuaScript("function hook(msg)\n local x =\n end", SHAPE)
    with pytest.raises(ScriptError, match="limit of 100000 instructions exceeded"):
        LuaScript("while true do end", SHAPE)
    with pytest.raises(ScriptError, match="limit of 2097152 bytes of memory exceeded"):
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
        ("--" + "x" * SOURCE_BYTES_MAX, "the limit is"),
        ("function hook(msg) return \ud800 end", "cannot be encoded as UTF-8"),
    ],
)
def test_unusable_sources_are_refused(source: str, problem: str) -> None:
    with pytest.raises(ScriptError, match=problem):
        LuaScript(source, SHAPE)


def test_a_source_that_is_not_text_and_limits_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="a script must be a string"):
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
        ("return {text = '\\xff'}", "not valid UTF-8"),
        ("return {list = {'\\xff'}}", "not valid UTF-8"),
    ],
)
def test_errors_name_results_of_the_wrong_type(body: str, problem: str) -> None:
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


def test_run_continues_after_a_failed_record() -> None:
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
    assert failure is None, "CPU time of earlier records does not count"


def test_decoding_a_message_is_not_charged_to_the_script() -> None:
    target = script("return {number = 1}", limits=ScriptLimits(instructions_max=1000))
    assert call(target, {str(number): "x" for number in range(1024)}) == (None, 1, None)


def test_records_beyond_one_call_are_all_processed() -> None:
    target = script("return {number = msg.size, text = tostring(#msg.headers.h)}")
    large = "x" * (INPUT_BYTES_MAX // 3)
    records = [target.encode_record(("q", i), {"h": large}) for i in range(20)]
    records.append(target.encode_record(("q", 20), {"h": "y" * (1 << 20)}))
    rows, failure = target.run(records)
    assert failure is None
    assert [row[1] for row in rows] == list(range(21))
    assert rows[20][0] == str(1 << 20)
    assert target.run([]) == ([], None)


def test_script_state_persists_until_a_limit_error() -> None:
    target = script("count = (count or 0) + 1 if msg.headers.burn then while true do end end return {number = count}")
    assert [call(target), call(target)] == [(None, 1, None), (None, 2, None)]
    assert isinstance(call(target, {"burn": "1"}), ScriptFailure)
    assert call(target) == (None, 1, None)
    target.release()
    assert target.memory_bytes == 0
    assert call(target) == (None, 1, None)


def test_script_that_fills_its_memory_is_restarted() -> None:
    target = script("keep = keep or {} keep[#keep + 1] = ('x'):rep(100000) .. #keep return {number = #keep}")
    counts = []
    for _ in range(60):
        row = call(target)
        assert isinstance(row, tuple)
        assert isinstance(row[1], int)
        counts.append(row[1])
    assert max(counts) < 25


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


def test_reading_state_is_charged() -> None:
    asked: list[str] = []
    target = script("for i = 1, 1e9 do fila.get('k' .. i) end", read_state=asked.append)
    assert isinstance(call(target), ScriptFailure)
    assert len(asked) <= 200


def test_state_can_be_read_at_the_top_level() -> None:
    target = LuaScript(
        "local a = fila.get('a') function hook() return {text = a} end", SHAPE, read_state=lambda key: key
    )
    assert call(target) == ("a", None, None)


def test_state_access_where_unavailable_is_an_error() -> None:
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
