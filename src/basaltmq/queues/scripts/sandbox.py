"""A user's Lua script, run inside limits that hold against a hostile one (SPEC C12).

A `LuaScript` has a Lua 5.4 runtime of its own, so nothing one script does to its libraries is seen by another. It is
called with records (a message each, encoded by `encode_record`) and answers with rows (the fields asked for, their
types checked). Many records go in one call: crossing into Lua costs about as much as a small script.

What is left to others: what the fields mean, what happens after a failure (`hooks`). What is enforced inside Lua is
told in `lua_guard`. Not thread-safe: the caller holds its plane's lock.

Rules that keep the process alive, whatever the script does:
- Pushing a value into a Lua that has no memory left aborts the process, and an out-of-memory error that unwinds through
  a Python function called from Lua leaves the interpreter lock taken. So Python never lends Lua a callable, and each
  call first makes sure that what it pushes fits.
- After a limit was hit the runtime is thrown away and made again for the next call.

State: globals and upvalues of a script live from call to call, until its runtime is made again (after a limit, when it
holds more than half of its memory, on `release`). A script must not count on either.

Record, little-endian:

    | inputs: integer i64, string u32 + bytes | headers u32 | name u32 + bytes | value u32 + bytes | ... |

Row, little-endian; a field is present when its bit is set:

    | bits u8 | string: u32 + bytes | integer: i64 | strings: u32 size of all, u32 + bytes each | ... |
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, Literal

from basaltmq.errors import InvalidArgumentError, ScriptError
from basaltmq.queues.scripts.lua_guard import GUARD
from basaltmq.queues.scripts.lua_patterns import PATTERNS

SOURCE_BYTES_MAX: Final = 64 << 10
"""A hook is a page of code; the parser is not interrupted, and 64 KiB of the worst source parse in 0.2 s."""

INPUT_BYTES_MAX: Final = 256 << 10
"""Records put into one call; a larger single record goes alone."""

STATE_KEY_BYTES_MAX: Final = 1024
STATE_VALUE_BYTES_MAX: Final = 64 << 10

HOOK_INTERVAL: Final = 300
"""Instructions between two looks at the limits. An instruction on a string as large as the memory limit takes about
0.1 ms, so that is some 30 ms at worst; a look costs about 1 us, and most scripts end before their first."""

BUDGET_GRACE_US: Final = 10_000
"""For the record that is worked on when the time of a call is over: five times what its instructions take."""

_SLICE_US_MIN: Final = 1_000
"""Time for one call into Lua at least: less would not get through one record."""

_UNLIMITED_US: Final = 1 << 50

_PUSH_BYTES: Final = 64 << 10
"""What a call may need besides its argument before Lua is in protected mode: string headers, stack growth."""

Kind = Literal["string", "integer", "strings"]
Fault = Literal["error", "instructions", "cpu", "memory", "result", "budget"]
Value = str | int | tuple[str, ...] | None

_U32: Final = Struct("<I")
_I64: Final = Struct("<q")
_OWN_PLACE: Final = re.compile(r'\[string "<python>"\]:\d+: ')
_LINE: Final = re.compile(r":(\d+):")


@dataclass(frozen=True)
class ScriptLimits:
    """What one message may cost a script."""

    instructions_max: int = 100_000
    """About 2 ms of plain Lua."""

    memory_bytes_max: int = 2 << 20
    """For all the script keeps and makes, beside the records of the call."""

    cpu_ms_max: int = 50
    """CPU time of the process; only scripts whose single instructions are expensive get near it."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("instructions_max", 1000, 1_000_000_000),
            ("memory_bytes_max", 256 << 10, 1 << 30),
            ("cpu_ms_max", 1, 60_000),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise InvalidArgumentError(f"{name} of a script is {low} to {high}, not {value!r:.80}")


@dataclass(frozen=True)
class ScriptShape:
    """What a script is called with and answers: the name of its function, the fields of `msg`, those of its result."""

    entry: str
    inputs: tuple[tuple[str, Literal["string", "integer"]], ...]
    results: tuple[tuple[str, Kind], ...]

    def __post_init__(self) -> None:
        assert len(self.results) <= 8, "the row has one byte of bits"


@dataclass(frozen=True)
class ScriptFailure:
    """Why a record has no row."""

    fault: Fault
    text: str


class LuaScript:
    """A compiled script. Raises ScriptError, naming the line, when the source cannot be used."""

    def __init__(
        self,
        source: str,
        shape: ScriptShape,
        *,
        limits: ScriptLimits | None = None,
        read_state: Callable[[str], str | None] | None = None,
        seed: int = 0,
    ) -> None:
        self._source = _checked_source(source, shape.entry)
        self._shape = shape
        self._limits = ScriptLimits() if limits is None else limits
        self._read_state = read_state
        self._seed = seed
        self._lua: Any = _lua_module()
        self._runtime: Any = None
        self._step: Callable[..., tuple[Any, ...]] | None = None
        self._encode_inputs = tuple(kind == "integer" for _, kind in shape.inputs)
        failure = self._boot()
        if failure is not None:
            raise ScriptError(failure.text)

    def encode_record(self, values: Sequence[str | int], headers: Mapping[str, str]) -> bytes:
        """A message as the script will see it; `values` in the order of the shape's inputs."""
        parts: list[bytes] = []
        for is_integer, value in zip(self._encode_inputs, values, strict=True):
            if is_integer:
                assert isinstance(value, int)
                parts.append(_I64.pack(value))
            else:
                assert isinstance(value, str)
                raw = value.encode("utf-8", "surrogatepass")
                parts += (_U32.pack(len(raw)), raw)
        parts.append(_U32.pack(len(headers)))
        for name, text in headers.items():
            raw = name.encode("utf-8", "surrogatepass")
            raw_text = text.encode("utf-8", "surrogatepass")
            parts += (_U32.pack(len(raw)), raw, _U32.pack(len(raw_text)), raw_text)
        return b"".join(parts)

    def run(
        self, records: Sequence[bytes], left_us: Callable[[], int] = lambda: _UNLIMITED_US
    ) -> tuple[list[tuple[Value, ...]], ScriptFailure | None]:
        """Call the script for each record, up to the first failure, or until no time is left ("budget").

        The rows of the records before it, and the failure of the record behind the last row (None: all have rows). The
        caller goes on behind the failed record if it wants to.
        """
        rows: list[tuple[Value, ...]] = []
        at = 0
        while at < len(records):
            if left_us() <= 0:
                return rows, self.over_budget
            size = len(records[at])
            end = at + 1
            while end < len(records) and size + len(records[end]) <= INPUT_BYTES_MAX:
                size += len(records[end])
                end += 1
            got, failure = self._run_chunk(records[at:end], left_us)
            rows += got
            at += len(got)
            if failure is None and not got:
                failure = self.over_budget
            if failure is not None:
                return rows, failure
        return rows, None

    @property
    def over_budget(self) -> ScriptFailure:
        """Of records for which no time is left."""
        return self._failure("budget", "")

    def release(self) -> None:
        """Drop the runtime; the next run makes one again."""
        self._runtime = self._step = None

    @property
    def memory_bytes(self) -> int:
        """What the runtime holds at this moment, garbage included."""
        return 0 if self._runtime is None else int(self._runtime.get_memory_used(total=True))

    def _run_chunk(
        self, records: Sequence[bytes], left_us: Callable[[], int]
    ) -> tuple[list[tuple[Value, ...]], ScriptFailure | None]:
        """As `run`; without a failure it may also end early, as the clock of Lua counts other threads too."""
        data = b"".join(records)
        failure = self._make_room(len(data))
        if failure is not None:
            return [], failure
        assert self._step is not None
        try:
            status, raw, done, text = self._answer(self._step(data, len(records), False, max(_SLICE_US_MIN, left_us())))
        except self._lua.LuaMemoryError:
            # The trusted side ran out of memory, so what was done is not known. Alone, each record fails by itself.
            self.release()
            if len(records) == 1:
                return [], self._failure("memory", "")
            rows: list[tuple[Value, ...]] = []
            for record in records:
                if left_us() <= 0:
                    return rows, self.over_budget
                row, failure = self._run_chunk([record], left_us)
                rows += row
                if failure is not None or not row:
                    return rows, failure
            return rows, None
        except self._lua.LuaError:
            self.release()
            return [], ScriptFailure("error", f"{self._shape.entry}: the script broke its runtime")
        rows = self._decode_rows(raw, done)
        if status not in ("done", "error"):
            self.release()
        else:
            self._shed_garbage()
        if len(rows) < done:
            return rows, ScriptFailure("result", f"{self._shape.entry}: a field of the result is not UTF-8 text")
        return rows, None if status == "done" else self._failure(status, text)

    def _boot(self) -> ScriptFailure | None:
        """A fresh runtime with the script loaded. The failure is that of the source or of its top level."""
        limits = self._limits
        shape = self._shape
        self._runtime = self._lua.LuaRuntime(
            encoding=None,
            register_eval=False,
            register_builtins=False,
            attribute_handlers=(_no_attribute, _no_attribute),
            max_memory=limits.memory_bytes_max,
        )
        start, self._step = self._runtime.execute(
            GUARD.replace(b"PATTERNS\n", PATTERNS, 1),
            limits.instructions_max,
            HOOK_INTERVAL,
            limits.cpu_ms_max * 1000,
            BUDGET_GRACE_US,
            limits.memory_bytes_max,
            self._seed,
            shape.entry.encode(),
            ("<" + "".join("i8" if kind == "integer" else "s4" for _, kind in shape.inputs)).encode(),
            ",".join(name for name, _ in shape.inputs).encode(),
            ",".join(f"{name}:{kind}" for name, kind in shape.results).encode(),
        )
        try:
            answer = self._answer(start(self._source))
        except self._lua.LuaMemoryError:
            answer = ("memory", b"", 0, "")
        status, raw, _, text = answer
        if status == "ready":
            return None
        self.release()
        if status == "syntax":
            return ScriptFailure("error", _compile_text(shape.entry, _clean(raw)))
        return self._failure(status, text)

    def _make_room(self, size_bytes: int) -> ScriptFailure | None:
        """A runtime that `size_bytes` can be pushed into, made again if the script left no room in this one."""
        runtime = self._runtime
        if runtime is not None:
            # The record, its strings taken apart, and the tables around them.
            runtime.set_max_memory(self._limits.memory_bytes_max + 3 * size_bytes)
            if self._fits(size_bytes):
                return None
            runtime.gccollect()
            if self._fits(size_bytes):
                return None
        failure = self._boot()
        if failure is None:
            assert self._runtime is not None
            self._runtime.set_max_memory(self._limits.memory_bytes_max + 3 * size_bytes)
            if not self._fits(size_bytes):
                self.release()
                return self._failure("memory", "")
        return failure

    def _fits(self, size_bytes: int) -> bool:
        runtime = self._runtime
        assert runtime is not None
        return bool(runtime.get_memory_used() + size_bytes + _PUSH_BYTES <= runtime.get_max_memory())

    def _answer(self, said: tuple[Any, ...]) -> tuple[str, bytes, int, str]:
        """What the script came to, after giving it the state it asks for on its way."""
        while said[0] == b"need":
            try:
                failed, value = self._state_value(said[1])
            except BaseException:
                # The script waits inside fila.get for ever: nothing else may be asked of this runtime.
                self.release()
                raise
            assert self._step is not None
            if value is not None and not self._fits(len(value)):
                failed, value = True, None
            said = self._step(value, 0, failed)
        return said[0].decode(), said[1], said[2], _clean(said[3]) if len(said) > 3 else ""

    def _state_value(self, key: bytes) -> tuple[bool, bytes | None]:
        """(could not be read, value)"""
        if self._read_state is None:
            return False, None
        if len(key) > STATE_KEY_BYTES_MAX:
            return True, None
        try:
            value = self._read_state(key.decode())
            raw = None if value is None else value.encode("utf-8", "surrogatepass")
        except Exception:
            # Whatever it was, its text is not for a script; the script gets a Lua error and the run is counted.
            return True, None
        if raw is not None and len(raw) > STATE_VALUE_BYTES_MAX:
            return True, None
        return False, raw

    def _shed_garbage(self) -> None:
        runtime = self._runtime
        assert runtime is not None
        keep_bytes = self._limits.memory_bytes_max // 2
        if runtime.get_memory_used() > keep_bytes:
            runtime.gccollect()
            if runtime.get_memory_used() > keep_bytes:
                self.release()

    def _failure(self, status: str, text: str) -> ScriptFailure:
        entry = self._shape.entry
        limits = self._limits
        if status == "instructions":
            return ScriptFailure("instructions", f"{entry}: over the limit of {limits.instructions_max} instructions")
        if status == "cpu":
            return ScriptFailure("cpu", f"{entry}: over the limit of {limits.cpu_ms_max} ms of CPU")
        if status == "budget":
            return ScriptFailure("budget", f"{entry}: the time for scripts is used up; defaults apply")
        if status == "memory":
            return ScriptFailure("memory", f"{entry}: over the limit of {limits.memory_bytes_max} bytes of memory")
        return ScriptFailure("error", text)

    def _decode_rows(self, raw: bytes, count: int) -> list[tuple[Value, ...]]:
        """Up to `count` rows; fewer when one holds bytes that are not text."""
        rows: list[tuple[Value, ...]] = []
        at = 0
        kinds = tuple(kind for _, kind in self._shape.results)
        for _ in range(count):
            bits = raw[at]
            at += 1
            row: list[Value] = []
            try:
                for kind in kinds:
                    if not bits & 1:
                        row.append(None)
                    elif kind == "integer":
                        row.append(_I64.unpack_from(raw, at)[0])
                        at += 8
                    else:
                        end = at + 4 + _U32.unpack_from(raw, at)[0]
                        part = raw[at + 4 : end]
                        row.append(part.decode() if kind == "string" else _decode_strings(part))
                        at = end
                    bits >>= 1
            except UnicodeDecodeError:
                break
            rows.append(tuple(row))
        return rows


def _lua_module() -> Any:
    """Scripts are optional, so lupa is looked for only when there is one."""
    try:
        return importlib.import_module("lupa.lua54")
    except ImportError:
        raise ScriptError("scripts need the package lupa with Lua 5.4: install basaltmq[lua]") from None


def _decode_strings(raw: bytes) -> tuple[str, ...]:
    texts: list[str] = []
    at = 0
    while at < len(raw):
        end = at + 4 + _U32.unpack_from(raw, at)[0]
        texts.append(raw[at + 4 : end].decode())
        at = end
    return tuple(texts)


def _checked_source(source: str, entry: str) -> bytes:
    if not isinstance(source, str):
        raise InvalidArgumentError(f"a script is text, not {type(source).__name__}")
    try:
        raw = source.encode()
    except UnicodeEncodeError:
        raise ScriptError(f"{entry}: the script is not Unicode text") from None
    if len(raw) > SOURCE_BYTES_MAX:
        raise ScriptError(f"{entry}: a script of {len(raw)} bytes is over the limit of {SOURCE_BYTES_MAX}")
    if not raw.strip():
        raise ScriptError(f"{entry}: the script is empty; define function {entry}(msg)")
    return raw


def _compile_text(entry: str, text: str) -> str:
    line = _LINE.search(text)
    where = f" at line {line.group(1)}" if line else ""
    return f"{entry} does not compile{where}: {text}"


def _clean(raw: bytes) -> str:
    """Error text of a script, fit for a log line and an answer to a client."""
    text = _OWN_PLACE.sub("", raw.decode("utf-8", "replace"))
    return "".join(c if c.isprintable() else " " for c in text)


def _no_attribute(*_: object) -> None:
    raise AttributeError("not available to scripts")
