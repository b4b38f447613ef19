-- Lua's pattern functions for the sandbox: same results as the C library, with bounded cost.
--
-- The C matcher backtracks: `.-.-.-.-x` over n bytes takes about n^4 steps, and no hook can interrupt C code.
-- `analyse` computes the worst-case number of steps of a pattern on a subject of n bytes. Each `*`, `+`, `-`, `%b` and
-- back reference contributes a factor n, each `?` a factor 2, the largest set its size, and a missing anchor another n.
-- Up to `fast_steps_max` steps the C function runs and is charged its worst case. Above that, a matcher written in Lua
-- runs, and its instructions count like those of user code. It follows the published semantics of Lua patterns; a
-- property test compares both over random patterns and subjects.
--
-- guard.lua includes this file as text. The code uses guard.lua's locals: byte, char, find, charge and others.

do
    local fast_steps_max = 8192 -- about 50 us of C in the worst case
    local pattern_bytes_fast = 256 -- longer patterns are not cached and use the Lua matcher
    local costs, costs_count = {}, 0

    -- Return the cost of one match attempt as (number of factors n, constant factor, anchored), or nil if malformed.
    local function analyse(pattern)
        local p, length, powers, factor, set_max = 1, #pattern, 0, 1, 1
        local anchored = byte(pattern, 1) == 94
        if anchored then p = 2 end
        while p <= length do
            local c = byte(pattern, p)
            if c == 37 then
                local d = byte(pattern, p + 1)
                if not d then return nil end
                if d == 98 or (d >= 48 and d <= 57) then powers = powers + 1 end
                p = p + 2
            elseif c == 91 then
                local from = p
                p = p + 1
                if byte(pattern, p) == 94 then p = p + 1 end
                repeat
                    if p > length then return nil end
                    if byte(pattern, p) == 37 then p = p + 2 else p = p + 1 end
                until byte(pattern, p) == 93
                p = p + 1
                if p - from > set_max then set_max = p - from end
            else
                if c == 42 or c == 43 or c == 45 then
                    powers = powers + 1
                elseif c == 63 then
                    factor = factor * 2
                end
                p = p + 1
            end
            if powers > 8 or factor > 4096 then return nil end
        end
        return powers, factor * set_max, anchored
    end

    -- Charge the worst case and return true if the C function may run; return false if the Lua matcher must run.
    local function is_cheap(pattern, subject_bytes, everywhere)
        local cost = costs[pattern]
        if cost == nil then
            if #pattern > pattern_bytes_fast then return false end
            local powers, factor, anchored = analyse(pattern)
            cost = powers and { powers, factor, anchored } or false
            if costs_count >= 64 then costs, costs_count = {}, 0 end
            costs[pattern], costs_count = cost, costs_count + 1
        end
        if not cost then return false end
        local steps = cost[2]
        local powers = cost[1]
        if everywhere or not cost[3] then powers = powers + 1 end
        for _ = 1, powers do
            steps = steps * (subject_bytes + 1)
            if steps > fast_steps_max then return false end
        end
        charge(steps // 16)
        return true
    end

    local classes = {}

    local function class_of(letter)
        local class = classes[letter]
        if class == nil then
            local l = char(letter)
            class = false
            if find("acdglpsuwxz", lower(l), 1, true) then
                class = {}
                local test = "%" .. l
                for c = 0, 255 do
                    if find(char(c), test) then class[c] = true end
                end
            end
            classes[letter] = class
        end
        return class
    end

    local function class_matches(c, letter)
        local class = class_of(letter)
        if class then return class[c] == true end
        return c == letter
    end

    local function class_end(pattern, p)
        local c = byte(pattern, p)
        if c == 37 then
            if p >= #pattern then error("malformed pattern (ends with '%')", 0) end
            return p + 2
        elseif c == 91 then
            p = p + 1
            if byte(pattern, p) == 94 then p = p + 1 end
            repeat
                if p > #pattern then error("malformed pattern (missing ']')", 0) end
                local d = byte(pattern, p)
                p = p + 1
                if d == 37 then p = p + 1 end
            until byte(pattern, p) == 93
            return p + 1
        end
        return p + 1
    end

    local function set_matches(pattern, c, p, last)
        local found = true
        p = p + 1
        if byte(pattern, p) == 94 then
            found = false
            p = p + 1
        end
        while p < last do
            local d = byte(pattern, p)
            if d == 37 then
                p = p + 1
                if class_matches(c, byte(pattern, p)) then return found end
                p = p + 1
            elseif byte(pattern, p + 1) == 45 and p + 2 < last then
                if d <= c and c <= byte(pattern, p + 2) then return found end
                p = p + 3
            else
                if d == c then return found end
                p = p + 1
            end
        end
        return not found
    end

    -- `m` is one match: src, pat, level, and the start and length of each capture (-1: open, -2: position).
    local function single(m, s, p, ep)
        local c = byte(m.src, s)
        if not c then return false end
        local d = byte(m.pat, p)
        if d == 46 then return true end
        if d == 37 then return class_matches(c, byte(m.pat, p + 1)) end
        if d == 91 then return set_matches(m.pat, c, p, ep - 1) end
        return c == d
    end

    local try

    local function balance(m, s, p)
        if p + 1 > #m.pat then error("malformed pattern (missing arguments to '%b')", 0) end
        local open, shut = byte(m.pat, p), byte(m.pat, p + 1)
        if byte(m.src, s) ~= open then return nil end
        local depth = 1
        for i = s + 1, #m.src do
            local c = byte(m.src, i)
            if c == shut then
                depth = depth - 1
                if depth == 0 then return i + 1 end
            elseif c == open then
                depth = depth + 1
            end
        end
        return nil
    end

    local function capture_index(m, digit)
        local index = digit - 48
        if index < 1 or index > m.level or m[2 * index] == -1 then
            error("invalid capture index %" .. index, 0)
        end
        return index
    end

    local function open_capture(m, s, p, kind)
        if m.level >= 32 then error("too many captures", 0) end
        m.level = m.level + 1
        m[2 * m.level - 1], m[2 * m.level] = s, kind
        local e = try(m, s, p)
        if not e then m.level = m.level - 1 end
        return e
    end

    local function close_capture(m, s, p)
        for level = m.level, 1, -1 do
            if m[2 * level] == -1 then
                m[2 * level] = s - m[2 * level - 1]
                local e = try(m, s, p)
                if not e then m[2 * level] = -1 end
                return e
            end
        end
        error("invalid pattern capture", 0)
    end

    function try(m, s, p)
        local pat, src = m.pat, m.src
        while p <= #pat do
            local c = byte(pat, p)
            local d = byte(pat, p + 1)
            if c == 40 then
                if d == 41 then return open_capture(m, s, p + 2, -2) end
                return open_capture(m, s, p + 1, -1)
            elseif c == 41 then
                return close_capture(m, s, p + 1)
            elseif c == 36 and p == #pat then
                return s == #src + 1 and s or nil
            elseif c == 37 and d == 98 then
                s = balance(m, s, p + 2)
                if not s then return nil end
                p = p + 4
            elseif c == 37 and d == 102 then
                p = p + 2
                if byte(pat, p) ~= 91 then error("missing '[' after '%f' in pattern", 0) end
                local ep = class_end(pat, p)
                local before, here = byte(src, s - 1) or 0, byte(src, s) or 0
                if s == 1 then before = 0 end
                if set_matches(pat, before, p, ep - 1) or not set_matches(pat, here, p, ep - 1) then return nil end
                p = ep
            elseif c == 37 and d and d >= 48 and d <= 57 then
                local index = capture_index(m, d)
                local from, size = m[2 * index - 1], m[2 * index]
                if size < 0 then return nil end -- a position capture matches nothing
                charge(size // 16)
                if size > #src - s + 1 then return nil end
                if sub(src, from, from + size - 1) ~= sub(src, s, s + size - 1) then return nil end
                s, p = s + size, p + 2
            else
                local ep = class_end(pat, p)
                local quantifier = byte(pat, ep)
                if quantifier == 63 then
                    if single(m, s, p, ep) then
                        local e = try(m, s + 1, ep + 1)
                        if e then return e end
                    end
                    p = ep + 1
                elseif quantifier == 42 or quantifier == 43 then
                    local i = 0
                    while single(m, s + i, p, ep) do i = i + 1 end
                    local least = quantifier == 43 and 1 or 0
                    while i >= least do
                        local e = try(m, s + i, ep + 1)
                        if e then return e end
                        i = i - 1
                    end
                    return nil
                elseif quantifier == 45 then
                    while true do
                        local e = try(m, s, ep + 1)
                        if e then return e end
                        if not single(m, s, p, ep) then return nil end
                        s = s + 1
                    end
                elseif single(m, s, p, ep) then
                    s, p = s + 1, ep
                else
                    return nil
                end
            end
        end
        return s
    end

    local function capture(m, index, s, e)
        if index > m.level then
            if index ~= 1 then error("invalid capture index %" .. index, 0) end
            return sub(m.src, s, e - 1)
        end
        local from, size = m[2 * index - 1], m[2 * index]
        if size == -2 then return from end
        if size == -1 then error("unfinished capture", 0) end
        return sub(m.src, from, from + size - 1)
    end

    -- Return all captures, or the whole match if there are none and `whole` is set.
    local function captures(m, s, e, whole)
        local count = m.level
        if count == 0 and whole then count = 1 end
        local values = {}
        for i = 1, count do values[i] = capture(m, i, s, e) end
        return tunpack(values, 1, count)
    end

    local function search(src, pattern, init, want_find)
        local anchored = byte(pattern, 1) == 94
        local m = { src = src, pat = pattern, level = 0 }
        local p = anchored and 2 or 1
        for s = init, #src + 1 do
            m.level = 0
            local e = try(m, s, p)
            if e then
                if want_find then return s, e - 1, captures(m, s, e, false) end
                return captures(m, s, e, true)
            end
            if anchored then break end
        end
        return nil
    end

    local function first_position(init, length)
        if init > 0 then return init end
        if init == 0 then return 1 end
        if init < -length then return 1 end
        return length + init + 1
    end

    function safe_string.find(s, pattern, init, is_plain)
        s, pattern = string_argument("find", 1, s), string_argument("find", 2, pattern)
        init = first_position(integer_argument("find", 3, init, 1), #s)
        if init > #s + 1 then return nil end
        if is_plain or not find(pattern, "[%^%$%*%+%?%.%(%[%%%-]") then
            -- The C search runs a memchr, and a memcmp for each candidate.
            charge((#s - init + 1) * (#pattern < 16 and 1 or #pattern // 16) // 16)
            return find(s, pattern, init, true)
        end
        if is_cheap(pattern, #s - init + 1) then return find(s, pattern, init) end
        return search(s, pattern, init, true)
    end

    function safe_string.match(s, pattern, init)
        s, pattern = string_argument("match", 1, s), string_argument("match", 2, pattern)
        init = first_position(integer_argument("match", 3, init, 1), #s)
        if init > #s + 1 then return nil end
        if is_cheap(pattern, #s - init + 1) then return match(s, pattern, init) end
        return search(s, pattern, init, false)
    end

    function safe_string.gmatch(s, pattern, init)
        s, pattern = string_argument("gmatch", 1, s), string_argument("gmatch", 2, pattern)
        init = first_position(integer_argument("gmatch", 3, init, 1), #s)
        if init > #s + 1 then init = #s + 2 end
        -- In gmatch a '^' does not anchor; it is an ordinary character.
        if is_cheap(pattern, #s - init + 2, true) then return gmatch(s, pattern, init) end
        local last = nil
        return function()
            local m = { src = s, pat = pattern, level = 0 }
            for from = init, #s + 1 do
                m.level = 0
                local e = try(m, from, 1)
                if e and e ~= last then
                    init, last = e, e
                    return captures(m, from, e, true)
                end
            end
            init = #s + 2
            return nil
        end
    end

    local function expand(m, s, e, template)
        local parts, p = {}, 1
        while true do
            local at = find(template, "%", p, true)
            if not at then break end
            parts[#parts + 1] = sub(template, p, at - 1)
            local d = byte(template, at + 1)
            if d == 37 then
                parts[#parts + 1] = "%"
            elseif d == 48 then
                parts[#parts + 1] = sub(m.src, s, e - 1)
            elseif d and d >= 49 and d <= 57 then
                parts[#parts + 1] = tostring(capture(m, d - 48, s, e))
            else
                error("invalid use of '%' in replacement string", 0)
            end
            p = at + 2
        end
        parts[#parts + 1] = sub(template, p)
        return concat(parts)
    end

    local function replacement(m, s, e, with, kind)
        local value
        if kind == "string" then return expand(m, s, e, with) end
        if kind == "table" then
            value = with[capture(m, 1, s, e)]
        else
            value = with(captures(m, s, e, true))
        end
        if not value then return sub(m.src, s, e - 1) end
        if type(value) == "string" then return value end
        if type(value) == "number" then return tostring(value) end
        error("invalid replacement value (a " .. type(value) .. ")", 0)
    end

    function safe_string.gsub(s, pattern, with, most)
        s, pattern = string_argument("gsub", 1, s), string_argument("gsub", 2, pattern)
        local kind = type(with)
        if kind == "number" then with, kind = tostring(with), "string" end
        if kind ~= "string" and kind ~= "table" and kind ~= "function" then
            bad_argument("gsub", 3, "string/function/table", with)
        end
        most = integer_argument("gsub", 4, most, #s + 1)
        if kind == "string" and is_cheap(pattern, #s) then
            charge((#s + 1) * #with // 64)
            return gsub(s, pattern, with, most)
        end
        local anchored = byte(pattern, 1) == 94
        local m = { src = s, pat = pattern, level = 0 }
        local p = anchored and 2 or 1
        local at, count, last, parts = 1, 0, nil, {}
        while count < most do
            m.level = 0
            local e = try(m, at, p)
            if e and e ~= last then
                count = count + 1
                parts[#parts + 1] = replacement(m, at, e, with, kind)
                at, last = e, e
            elseif at <= #s then
                parts[#parts + 1] = sub(s, at, at)
                at = at + 1
            else
                break
            end
            if anchored then break end
        end
        parts[#parts + 1] = sub(s, at)
        local text = concat(parts)
        charge(#text // 64)
        return text, count
    end
end
