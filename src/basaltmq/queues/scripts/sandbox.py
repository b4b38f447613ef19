"""Runs a user's Lua script inside limits that hold against hostile code (SPEC C12).

A `LuaScript` has its own Lua 5.4 runtime, so scripts cannot affect each other. It takes records (one message each,
encoded by `encode_record`) and returns rows (the requested fields, types checked). One call carries many records,
because crossing into Lua costs about as much as a small script.

guard.lua and patterns.lua enforce the limits inside Lua. hooks.py interprets the fields and handles failures. Not
thread-safe: the caller holds its plane's lock.

Rules that keep the process alive:
- Pushing a value into a Lua runtime without free memory aborts the process. So each call first checks that its
  arguments fit.
- An out-of-memory error that unwinds through a Python function called from Lua never releases the GIL. So Python never
  passes a callable to Lua.
- After a limit was hit, the runtime is discarded. The next call creates a new one.

State: a script's globals and upvalues persist between calls until its runtime is discarded. That happens after a limit,
when it holds more than half of its memory, or on `release`. Scripts must not rely on either.

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
from importlib.resources import files
from struct import Struct
from typing import Any, Final, Literal

from basaltmq.errors import InvalidArgumentError, ScriptError, install_hint

GUARD: Final = files(__package__).joinpath("guard.lua").read_bytes()
PATTERNS: Final = files(__package__).joinpath("patterns.lua").read_bytes()
PATTERNS_MARK: Final = b"-- include patterns.lua\n"
"""The line of guard.lua that patterns.lua replaces."""

SOURCE_BYTES_MAX: Final = 64 << 10
"""Largest script source. Nothing interrupts the parser, and 64 KiB of the worst source parse in 0.2 s."""

INPUT_BYTES_MAX: Final = 256 << 10
"""Bytes of records per call into Lua. A larger record goes alone."""

STATE_KEY_BYTES_MAX: Final = 1024
STATE_VALUE_BYTES_MAX: Final = 64 << 10

HOOK_INTERVAL: Final = 300
"""Instructions between two checks of the limits. An instruction on a string as large as the memory limit takes about
0.1 ms, so an interval takes at most about 30 ms. A check costs about 1 us, and most scripts end before the first."""

BUDGET_GRACE_US: Final = 10_000
"""Time for the current record to finish after the call's time is used up: five times what its instructions take."""

_STEP_US_MIN: Final = 1_000
"""Minimum time for one call into Lua. Less would not complete one record."""

_UNLIMITED_US: Final = 1 << 50

_PUSH_BYTES: Final = 64 << 10
"""Memory that a call needs besides its argument before Lua is in protected mode: string headers, stack growth."""

Kind = Literal["string", "integer", "strings"]
Fault = Literal["error", "instructions", "cpu", "memory", "result", "budget"]
Value = str | int | tuple[str, ...] | None

_U32: Final = Struct("<I")
_I64: Final = Struct("<q")
_GUARD_POSITION: Final = re.compile(r'\[string "<python>"\]:\d+: ')
_LINE: Final = re.compile(r":(\d+):")


@dataclass(frozen=True)
class ScriptLimits:
    """Limits of a script per message."""

    instructions_max: int = 100_000
    """About 2 ms of plain Lua."""

    memory_bytes_max: int = 2 << 20
    """All memory of the script, without the records of the call."""

    cpu_ms_max: int = 50
    """CPU time of the process. Only scripts with expensive single instructions come near it."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("instructions_max", 1000, 1_000_000_000),
            ("memory_bytes_max", 256 << 10, 1 << 30),
            ("cpu_ms_max", 1, 60_000),
        ):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise InvalidArgumentError(f"{name} of a script must be {low} to {high}, got {value!r:.80}")


@dataclass(frozen=True)
class ScriptShape:
    """A script's interface: the name of its function, the fields of `msg`, and the fields of its result."""

    entry: str
    inputs: tuple[tuple[str, Literal["string", "integer"]], ...]
    results: tuple[tuple[str, Kind], ...]

    def __post_init__(self) -> None:
        assert len(self.results) <= 8, "the row has one byte for presence bits"


@dataclass(frozen=True)
class ScriptFailure:
    """Why a record has no row."""

    fault: Fault
    text: str


class LuaScript:
    """A compiled script. Raises ScriptError with the line number if the source is invalid."""

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
        """Encode a message for the script. `values` are in the order of the shape's inputs."""
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
        """Call the script for each record until the first failure, or until no time is left ("budget").

        Return the rows of the completed records, and the failure of the record after them. The failure is None if every
        record has a row. The caller may continue after the failed record.
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
        """The failure of records for which no time is left."""
        return self._failure("budget", "")

    def release(self) -> None:
        """Discard the runtime. The next run creates a new one."""
        self._runtime = self._step = None

    @property
    def memory_bytes(self) -> int:
        """Bytes that the runtime holds now, including garbage."""
        return 0 if self._runtime is None else int(self._runtime.get_memory_used(total=True))

    def _run_chunk(
        self, records: Sequence[bytes], left_us: Callable[[], int]
    ) -> tuple[list[tuple[Value, ...]], ScriptFailure | None]:
        """Like `run`. It can also end early without a failure, because Lua's clock counts other threads too."""
        data = b"".join(records)
        failure = self._make_room(len(data))
        if failure is not None:
            return [], failure
        assert self._step is not None
        try:
            status, raw, done, text = self._finish(self._step(data, len(records), False, max(_STEP_US_MIN, left_us())))
        except self._lua.LuaMemoryError:
            # guard.lua ran out of memory, so it is unknown which records completed. Run each record alone.
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
            return [], ScriptFailure("error", f"{self._shape.entry}: the script damaged its Lua runtime")
        rows = self._decode_rows(raw, done)
        if status not in ("done", "error"):
            self.release()
        else:
            self._limit_memory()
        if len(rows) < done:
            return rows, ScriptFailure("result", f"{self._shape.entry}: a field of the result is not valid UTF-8")
        return rows, None if status == "done" else self._failure(status, text)

    def _boot(self) -> ScriptFailure | None:
        """Create a runtime and load the script. Return the failure of the source or of its top-level code, if any."""
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
            GUARD.replace(PATTERNS_MARK, PATTERNS, 1),
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
            answer = self._finish(start(self._source))
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
        """Make sure the runtime can take `size_bytes`; recreate it if the script left no room."""
        runtime = self._runtime
        if runtime is not None:
            # The record, its decoded strings, and the tables around them.
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

    def _finish(self, reply: tuple[Any, ...]) -> tuple[str, bytes, int, str]:
        """Serve the script's `fila.get` requests until the run ends. Return (status, rows, rows done, error text)."""
        while reply[0] == b"need":
            try:
                failed, value = self._state_value(reply[1])
            except BaseException:
                # The script stays suspended inside fila.get, so this runtime cannot be used again.
                self.release()
                raise
            assert self._step is not None
            if value is not None and not self._fits(len(value)):
                failed, value = True, None
            reply = self._step(value, 0, failed)
        return reply[0].decode(), reply[1], reply[2], _clean(reply[3]) if len(reply) > 3 else ""

    def _state_value(self, key: bytes) -> tuple[bool, bytes | None]:
        """Return (whether reading failed, value)."""
        if self._read_state is None:
            return False, None
        if len(key) > STATE_KEY_BYTES_MAX:
            return True, None
        try:
            value = self._read_state(key.decode())
            raw = None if value is None else value.encode("utf-8", "surrogatepass")
        except Exception:
            # Do not show the error text to the script. It gets a Lua error, and the run counts as failed.
            return True, None
        if raw is not None and len(raw) > STATE_VALUE_BYTES_MAX:
            return True, None
        return False, raw

    def _limit_memory(self) -> None:
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
            return ScriptFailure("instructions", f"{entry}: limit of {limits.instructions_max} instructions exceeded")
        if status == "cpu":
            return ScriptFailure("cpu", f"{entry}: limit of {limits.cpu_ms_max} ms of CPU time exceeded")
        if status == "budget":
            return ScriptFailure("budget", f"{entry}: the script time budget is used up; defaults apply")
        if status == "memory":
            return ScriptFailure("memory", f"{entry}: limit of {limits.memory_bytes_max} bytes of memory exceeded")
        return ScriptFailure("error", text)

    def _decode_rows(self, raw: bytes, count: int) -> list[tuple[Value, ...]]:
        """Decode up to `count` rows. Stop at a row with bytes that are not UTF-8."""
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
    """Import lupa. It is an optional dependency, so the import happens with the first script."""
    try:
        return importlib.import_module("lupa.lua54")
    except ImportError:
        raise ScriptError(f"Lua scripts need lupa with Lua 5.4: {install_hint('lua')}") from None


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
        raise InvalidArgumentError(f"a script must be a string, got {type(source).__name__}")
    try:
        raw = source.encode()
    except UnicodeEncodeError:
        raise ScriptError(f"{entry}: the script cannot be encoded as UTF-8") from None
    if len(raw) > SOURCE_BYTES_MAX:
        raise ScriptError(f"{entry}: the script has {len(raw)} bytes, the limit is {SOURCE_BYTES_MAX}")
    if not raw.strip():
        raise ScriptError(f"{entry}: the script is empty; define function {entry}(msg)")
    return raw


def _compile_text(entry: str, text: str) -> str:
    line = _LINE.search(text)
    where = f" at line {line.group(1)}" if line else ""
    return f"{entry} does not compile{where}: {text}"


def _clean(raw: bytes) -> str:
    """Error text of a script without control characters, for logs and clients."""
    text = _GUARD_POSITION.sub("", raw.decode("utf-8", "replace"))
    return "".join(c if c.isprintable() else " " for c in text)


def _no_attribute(*_: object) -> None:
    raise AttributeError("not available to scripts")
