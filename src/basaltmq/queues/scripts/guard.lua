-- Trusted part of the script sandbox: defines what user code can call and stops it at its limits.
--
-- Python runs this file once in a fresh runtime, before any user code. It keeps the raw library functions in locals,
-- empties the real global table, and gives user code a separate environment with safe functions only. It returns
-- `start` and `step`, the only functions that Python calls. Both take and return strings and integers, so no Python
-- object exists inside Lua and user code cannot reach lupa's object bridge.
--
-- How user code is stopped
--   User code runs in a coroutine. A count hook on it fires every `interval` VM instructions, adds to `spent` and
--   reads the CPU clock. Above a limit, the hook sets itself to fire on every instruction and raises LIMIT. Code that
--   catches LIMIT cannot run another instruction, and `pcall` raises it again. The scheduler (`step`) runs on the main
--   thread without a hook, so it survives.
--   A call with many records has its own time limit, which the same hook checks. Above it no further record starts,
--   and a record that does not finish within `grace_us` is aborted. Python decides what happens to the other records.
--
-- Lua disables hooks in finalizers (`__gc`), in `xpcall` message handlers of an error raised in the hook, and in C
-- functions. Therefore:
--   * `setmetatable` installs a filtered copy of the metatable. The copy never has `__gc`, `__mode` or `__close`, even
--     if the script adds them to the original later.
--   * `xpcall` calls its handler after unwinding.
--   * There are no user coroutines, because the hook is per coroutine.
--   * Nested `pcall` calls have a depth limit.
--   * Every C function that can run for long is either wrapped and charged to `spent` before it runs, or reimplemented
--     in Lua (sort, and pattern matching above a small cost: patterns.lua).
--
-- An instruction on a long string copies up to the memory limit in bytes; the CPU clock bounds that. User code cannot
-- catch an out-of-memory error: it ends the run like the other limits. A limit can stop code at any instruction, so
-- nothing here relies on a cleanup step. Python discards the whole runtime after any limit.

local instructions_max, interval, cpu_us_max, grace_us, string_bytes_max, seed, entry, input_format, input_names,
    result_fields = ...

local assert, error, ipairs, load, next, pairs, pcall, select, tonumber, tostring, type =
    assert, error, ipairs, load, next, pairs, pcall, select, tonumber, tostring, type
local getmetatable, rawequal, rawget, rawlen, rawset, setmetatable =
    getmetatable, rawequal, rawget, rawlen, rawset, setmetatable
local byte, char, find, format, gmatch, gsub, lower, match, pack, rep, reverse, sub, unpack, upper =
    string.byte, string.char, string.find, string.format, string.gmatch, string.gsub, string.lower, string.match,
    string.pack, string.rep, string.reverse, string.sub, string.unpack, string.upper
local concat, insert, move, remove, tpack, tunpack =
    table.concat, table.insert, table.move, table.remove, table.pack, table.unpack
local co_create, co_resume, co_status, co_yield, isyieldable =
    coroutine.create, coroutine.resume, coroutine.status, coroutine.yield, coroutine.isyieldable
local clock, sethook, tointeger, ult = os.clock, debug.sethook, math.tointeger, math.ult
local math, utf8 = math, utf8
math.randomseed(seed)
local string_metatable = getmetatable("")

for key in pairs(package.loaded) do package.loaded[key] = nil end
for key in pairs(package.preload) do package.preload[key] = nil end
local globals = _G
for key in pairs(globals) do globals[key] = nil end

local LIMIT = {}
local spent, started, tripped = 0, nil, nil
-- The current call: start time, time limit in microseconds, and whether the limit has passed.
local call_started, call_us_max, call_is_over = 0, 0, false

local on_count

local function trip(kind)
    tripped = tripped or kind
    sethook(on_count, "", 1)
    error(LIMIT, 0)
end

function on_count()
    if tripped then error(LIMIT, 0) end
    spent = spent + interval
    if spent > instructions_max then trip("instructions") end
    local now = clock()
    if not started then
        started = now
    elseif (now - started) * 1000000 > cpu_us_max then
        trip("cpu")
    end
    local taken_us = (now - call_started) * 1000000
    if taken_us > call_us_max then
        -- The current record may finish within the grace period; after that it is aborted and not counted as failed.
        call_is_over = true
        if taken_us > call_us_max + grace_us then trip("budget") end
    end
end

-- Charge work done in C as instructions, before it runs.
local function charge(work)
    spent = spent + work
    if spent > instructions_max then trip("instructions") end
end

-- Error levels point at the user's line: above the library function and the function that checks its arguments.
local function bad_argument(where, position, expected, value, level)
    local got = value == nil and "no value" or type(value)
    error(format("bad argument #%d to '%s' (%s expected, got %s)", position, where, expected, got), level or 3)
end

local function string_argument(where, position, value)
    local kind = type(value)
    if kind == "string" then return value end
    if kind == "number" then return tostring(value) end
    bad_argument(where, position, "string", value, 4)
end

local function integer_argument(where, position, value, default)
    if value == nil and default then return default end
    local whole = tointeger(value) or tointeger(tonumber(value))
    if not whole then bad_argument(where, position, "whole number", value, 4) end
    return whole
end

-- C code honours __len and __index, and a script could fake an endless length. So C functions get plain tables only.
local function plain_length(where, value)
    if type(value) ~= "table" then bad_argument(where, 1, "table", value, 4) end
    if getmetatable(value) ~= nil then error("'" .. where .. "' takes a table without a metatable", 3) end
    return rawlen(value)
end

local safe_string, safe_table, safe_math, safe_utf8 = {}, {}, {}, {}
local env = {}
string_metatable.__index = safe_string

-- Lua's own nesting limit restarts after each caught error, and unwinding n levels takes n * n steps in C.
local nested, nested_max = 0, 100

local function check_pcall(ok, ...)
    nested = nested - 1
    if not ok then
        local problem = ...
        if tripped or problem == LIMIT then error(LIMIT, 0) end
        if problem == "not enough memory" then trip("memory") end
    end
    return ok, ...
end

local function safe_pcall(f, ...)
    if nested >= nested_max then error("pcall: more than " .. nested_max .. " calls inside one another", 2) end
    nested = nested + 1
    return check_pcall(pcall(f, ...))
end

local function handled(handler, ok, ...)
    if ok then return ok, ... end
    return false, handler(...)
end

local ORIGINAL = {}
local ALLOWED = {}
for word in gmatch("index newindex call tostring name len eq lt le concat unm add sub mul div mod pow idiv band bor "
        .. "bxor bnot shl shr pairs metatable", "%a+") do
    ALLOWED[#ALLOWED + 1] = "__" .. word
end

local function safe_setmetatable(t, meta)
    if type(t) ~= "table" then bad_argument("setmetatable", 1, "table", t) end
    if meta == nil then return setmetatable(t, nil) end
    if type(meta) ~= "table" then bad_argument("setmetatable", 2, "nil or table", meta) end
    local filtered = { [ORIGINAL] = meta }
    for i = 1, #ALLOWED do
        local field = ALLOWED[i]
        filtered[field] = rawget(meta, field)
    end
    if rawget(meta, "__gc") ~= nil or rawget(meta, "__mode") ~= nil or rawget(meta, "__close") ~= nil then
        error("__gc, __mode and __close are not available in a script", 2)
    end
    return setmetatable(t, filtered)
end

local function safe_getmetatable(value)
    if type(value) ~= "table" then return nil end
    local meta = getmetatable(value)
    if type(meta) ~= "table" then return meta end
    local original = rawget(meta, ORIGINAL)
    if original == nil then return meta end
    return original
end

-- Never return addresses: they differ between runs and reveal memory layout.
local function safe_tostring(value)
    local kind = type(value)
    if kind == "table" then
        local meta = getmetatable(value)
        if type(meta) == "table" then
            local maker, given = rawget(meta, "__tostring"), rawget(meta, "__name")
            if maker ~= nil then
                local text = maker(value)
                if type(text) ~= "string" then error("'__tostring' must return a string", 2) end
                return text
            end
            if type(given) == "string" then return given end
        end
        return kind
    elseif kind == "function" then
        return kind
    end
    return tostring(value)
end

for key, value in pairs({
    assert = assert, error = error, ipairs = ipairs, next = next, pairs = pairs, rawequal = rawequal,
    rawget = rawget, rawlen = rawlen, rawset = rawset, select = select, tonumber = tonumber, type = type,
    pcall = safe_pcall, setmetatable = safe_setmetatable, getmetatable = safe_getmetatable, tostring = safe_tostring,
    string = safe_string, table = safe_table, math = safe_math, utf8 = safe_utf8, _VERSION = "Lua 5.4",
}) do env[key] = value end
env._G = env

function env.xpcall(f, handler, ...)
    return handled(handler, safe_pcall(f, ...))
end

for key, value in pairs(math) do
    if key ~= "randomseed" then safe_math[key] = value end
end

safe_utf8.charpattern, safe_utf8.char, safe_utf8.codes = utf8.charpattern, utf8.char, utf8.codes
for _, key in ipairs({ "len", "codepoint", "offset" }) do
    local raw = utf8[key]
    safe_utf8[key] = function(s, ...)
        s = string_argument(key, 1, s)
        charge(#s // 8)
        return raw(s, ...)
    end
end

safe_string.char = char
function safe_string.byte(s, i, j)
    if j == nil then return byte(s, i or 1) end
    s, i, j = string_argument("byte", 1, s), integer_argument("byte", 2, i, 1), integer_argument("byte", 3, j)
    if i < 0 then i = #s + i + 1 end
    if i < 1 then i = 1 end
    if j < 0 then j = #s + j + 1 elseif j > #s then j = #s end
    if i > j then return end
    charge((j - i) // 4)
    return byte(s, i, j)
end
function safe_string.len(s) return #string_argument("len", 1, s) end
function safe_string.sub(s, i, j) return sub(s, i or 1, j or -1) end
for key, raw in pairs({ lower = lower, upper = upper, reverse = reverse }) do
    safe_string[key] = function(s)
        s = string_argument(key, 1, s)
        charge(#s // 16)
        return raw(s)
    end
end

function safe_string.rep(s, n, separator)
    s, n = string_argument("rep", 1, s), integer_argument("rep", 2, n)
    separator = separator == nil and "" or string_argument("rep", 3, separator)
    local unit = #s + #separator
    if n <= 0 or unit == 0 then return "" end
    if n > string_bytes_max // unit then error("resulting string too large", 2) end
    charge(n * unit // 64 + n // 16)
    return rep(s, n, separator)
end

function safe_string.format(template, ...)
    template = string_argument("format", 1, template)
    charge(#template // 4)
    if find(template, "%%[-%d]*p") and find(gsub(template, "%%%%", ""), "%%[-%d]*p") then
        error("'%p' is not available in a script", 2)
    end
    local values = tpack(...)
    for i = 1, values.n do
        local kind = type(values[i])
        if kind == "string" then
            charge(#values[i] // 8)
        elseif kind == "table" or kind == "function" then
            values[i] = safe_tostring(values[i])
        end
    end
    local text = format(template, tunpack(values, 1, values.n))
    charge(#text // 64)
    return text
end

function safe_table.pack(...) return tpack(...) end

function safe_table.unpack(t, i, j)
    i, j = integer_argument("unpack", 2, i, 1), integer_argument("unpack", 3, j, plain_length("unpack", t))
    if i > j then return end
    if ult(string_bytes_max, j - i) then error("too many results to unpack", 2) end
    charge((j - i) // 4)
    return tunpack(t, i, j)
end

function safe_table.concat(t, separator, i, j)
    local length = plain_length("concat", t)
    separator = separator == nil and "" or string_argument("concat", 2, separator)
    i, j = integer_argument("concat", 3, i, 1), integer_argument("concat", 4, j, length)
    if i > j then return "" end
    if ult(string_bytes_max, j - i) then error("too many values to concatenate", 2) end
    charge((j - i) // 2)
    local text = concat(t, separator, i, j)
    charge(#text // 64)
    return text
end

function safe_table.insert(t, ...)
    local length, count = plain_length("insert", t), select("#", ...)
    if count == 2 then
        local position = integer_argument("insert", 2, (...))
        if position < 1 or position > length + 1 then
            error("bad argument #2 to 'insert' (position out of bounds)", 2)
        end
        charge((length - position + 1) // 4)
        insert(t, position, (select(2, ...)))
    elseif count == 1 then
        insert(t, (...))
    else
        error("bad_argument number of arguments to 'insert'", 2)
    end
end

function safe_table.remove(t, position)
    local length = plain_length("remove", t)
    if position == nil then return remove(t) end
    position = integer_argument("remove", 2, position)
    if length + 1 ~= position and (position < 1 or position > length + 1) and not (length == 0 and position == 0) then
        error("bad argument #2 to 'remove' (position out of bounds)", 2)
    end
    if position <= length then charge((length - position) // 4) end
    return remove(t, position)
end

function safe_table.move(t, first, last, at, target)
    plain_length("move", t)
    if target ~= nil then plain_length("move", target) end
    first, last = integer_argument("move", 2, first), integer_argument("move", 3, last)
    at = integer_argument("move", 4, at)
    if last < first then return target or t end
    if ult(string_bytes_max, last - first) then error("too many elements to move", 2) end
    charge((last - first) // 2)
    return move(t, first, last, at, target or t)
end

-- Merge sort in Lua: comparing long strings is expensive, and no hook can interrupt a sort in C.
function safe_table.sort(t, before)
    local length = plain_length("sort", t)
    if before ~= nil and type(before) ~= "function" then bad_argument("sort", 2, "function", before) end
    local from, to, width = t, {}, 1
    while width < length do
        for low = 1, length, 2 * width do
            local middle, high = low + width, low + 2 * width
            if middle > length + 1 then middle = length + 1 end
            if high > length + 1 then high = length + 1 end
            local a, b = low, middle
            for k = low, high - 1 do
                local right
                if a >= middle then
                    right = true
                elseif b >= high then
                    right = false
                elseif before then
                    right = before(from[b], from[a])
                else
                    right = from[b] < from[a]
                end
                if right then
                    to[k], b = from[b], b + 1
                else
                    to[k], a = from[a], a + 1
                end
            end
        end
        if from == t then from, to = to, {} else from, to = to, from end
        width = 2 * width
    end
    if from ~= t then
        for k = 1, length do t[k] = from[k] end
    end
end

local NIL = {}
local state_cache = {}
local fila = {}
env.fila = fila

-- Python answers between two resumes, never from inside Lua: an error that unwinds through a Python frame is fatal.
function fila.get(key)
    if type(key) ~= "string" then bad_argument("fila.get", 1, "string", key) end
    local value = state_cache[key]
    if value == nil then
        charge(500)
        if not isyieldable() then error("fila.get cannot be called inside an iterator or __tostring", 2) end
        local failed
        value, failed = co_yield("need", key)
        if failed then error("fila.get: the value cannot be read", 2) end
        if value == nil then value = NIL end
        state_cache[key] = value
    end
    if value == NIL then return nil end
    return value
end

-- include patterns.lua

local names = {}
for word in gmatch(input_names, "[^,]+") do names[#names + 1] = word end
local fields = {}
local string_formats = {}

local function decode_headers(data, at)
    local count, headers = nil, {}
    count, at = unpack("<I4", data, at)
    while count > 0 do
        local some = count > 50 and 50 or count
        local layout = string_formats[some]
        if not layout then
            layout = "<" .. rep("s4", 2 * some)
            string_formats[some] = layout
        end
        local flat = { unpack(layout, data, at) }
        for i = 1, 2 * some, 2 do headers[flat[i]] = flat[i + 1] end
        at, count = flat[2 * some + 1], count - some
    end
    return headers, at
end

local function decode_message(data, at)
    local values = { unpack(input_format, data, at) }
    local message = {}
    for i = 1, #names do message[names[i]] = values[i] end
    message.headers, at = decode_headers(data, values[#names + 1])
    return message, at
end

local function field_error(field, expected, value)
    error(entry .. ": " .. field .. " must be " .. expected .. ", got " .. type(value), 0)
end

local function field_string(field, value)
    local kind = type(value)
    if kind == "string" then return value end
    if kind == "number" then return tostring(value) end
    field_error(field, "a string", value)
end

local function field_integer(field, value)
    if type(value) ~= "number" then field_error(field, "a whole number", value) end
    local whole = tointeger(value)
    if not whole then error(entry .. ": " .. field .. " must be a whole number, got " .. tostring(value), 0) end
    return whole
end

local function field_strings(field, value)
    if type(value) ~= "table" then field_error(field, "a list of strings", value) end
    local count = rawlen(value)
    if count == 0 then
        if next(value) ~= nil then
            error(entry .. ": " .. field .. " must be a list of strings, got a table with other keys", 0)
        end
        return ""
    end
    local parts = {}
    for i = 1, count do
        local one = rawget(value, i)
        if type(one) ~= "string" then one = field_string(field .. "[" .. i .. "]", one) end
        parts[i] = pack("<s4", one)
    end
    return concat(parts)
end

local row_formats = {}

local function encode_result(result)
    if result == nil then return "\0" end
    if type(result) ~= "table" then error(entry .. " must return a table, got " .. type(result), 0) end
    local mask, values, count = 0, {}, 0
    for i = 1, #fields do
        local field = fields[i]
        local value = result[field[1]]
        if value ~= nil then
            mask = mask | (1 << (i - 1))
            count = count + 1
            values[count] = field[2](field[1], value)
        end
    end
    local layout = row_formats[mask]
    if not layout then
        layout = "<B"
        for i = 1, #fields do
            if mask & (1 << (i - 1)) ~= 0 then layout = layout .. fields[i][3] end
        end
        row_formats[mask] = layout
    end
    return pack(layout, mask, tunpack(values, 1, count))
end

for word, kind in gmatch(result_fields, "([^,:]+):(%a+)") do
    if kind == "string" then
        fields[#fields + 1] = { word, field_string, "s4" }
    elseif kind == "integer" then
        fields[#fields + 1] = { word, field_integer, "i8" }
    else
        fields[#fields + 1] = { word, field_strings, "s4" }
    end
end

local handler
local chunk
local results, done, input, position, total = {}, 0, "", 1, 0

local function work()
    if not handler then
        local given = chunk()
        chunk = nil
        if type(given) ~= "function" then given = rawget(env, entry) end
        if type(given) ~= "function" then
            error("the script defines no function " .. entry .. "(msg)", 0)
        end
        handler = given
        co_yield("ready")
    end
    while true do
        while done < total and not call_is_over do
            local message
            -- Decoding a message is not charged to the script.
            spent = -(1 << 40)
            message, position = decode_message(input, position)
            spent, started, nested = 0, nil, 0
            results[done + 1] = encode_result(handler(message))
            done = done + 1
        end
        co_yield("done")
    end
end

local worker

local function problem_text(problem)
    if type(problem) == "string" then return sub(problem, 1, 512) end
    return "the script raised a value of type " .. type(problem)
end

local function outcome(ok, what, key)
    if ok then
        if what == "need" then return "need", key, 0 end
        return what, concat(results), done
    end
    if co_status(worker) == "dead" then worker = nil end
    local kind = tripped
    if not kind then kind = what == "not enough memory" and "memory" or "error" end
    return kind, concat(results), done, kind == "error" and problem_text(what) or ""
end

local function resume(...)
    if not worker then
        worker = co_create(work)
        sethook(worker, on_count, "", interval)
    end
    return outcome(co_resume(worker, ...))
end

local function start(source)
    local problem
    spent, started, call_started, call_us_max, call_is_over = 0, nil, clock(), math.huge, false
    chunk, problem = load(source, "=" .. entry, "t", env)
    if not chunk then return "syntax", problem_text(problem), 0 end
    return resume()
end

-- Process `count` records for at most `budget_us`; it can return fewer results. With count 0, resume the current run
-- with `data` (or nil) as the value it requested.
local function step(data, count, failed, budget_us)
    if count > 0 then
        input, position, total, done = data, 1, count, 0
        call_started, call_us_max, call_is_over = clock(), budget_us, false
        results, state_cache = {}, {}
        return resume()
    end
    return resume(data, failed)
end

return start, step
