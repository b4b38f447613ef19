"""Reads settings from defaults, a TOML file, environment variables and flags. Later sources override earlier ones.

Each value is validated as it is read, so an error names the key, the source and an example. An unknown key in the file
is an error. An unknown BASALT_ variable is only reported, because orchestrators set their own: a Kubernetes service
named `basalt` gives its pods BASALT_PORT.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

import msgspec

from basaltmq.broker.config.settings import Config, Leaf, Reload, Section, leaves, value_of
from basaltmq.broker.config.sizes import ByteCount, Share
from basaltmq.decoding import converter
from basaltmq.errors import InvalidConfigError

FILE_BYTES_MAX: Final = 1 << 20
"""Maximum size of a settings file. A larger file is probably a wrong path."""

OTHER_VARIABLES: Final = {"BASALT_CONFIG", "BASALT_SERVER", "BASALT_USER", "BASALT_PASSWORD"}
"""Variables of the command-line tools that are not settings of the broker."""

DEFAULT: Final = "default"
MASK: Final = "********"

_EXPECTED: Final = re.compile(r"Expected `(?P<type>\w+)`(?P<bounds> [<>=]+ \S+)?(?:, got `\w+`)?")
"""An error text of msgspec."""

_TYPES: Final = {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false", "array": "a list"}


class Loaded(msgspec.Struct, frozen=True):
    """The settings, the source of each one, and notes for the operator."""

    config: Config
    origins: dict[str, str]
    notes: list[str] = []


def load(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Loaded:
    """Read every source. `flags` maps dotted keys to their text on the command line."""
    known = {leaf.key: leaf for leaf in leaves()}
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, DEFAULT)
    notes: list[str] = []
    if file is not None:
        for key, value in _flat(_read(file), known, file):
            values[key] = _convert(known[key], value, f"in {file}")
            origins[key] = str(file)
    by_variable = {leaf.variable: leaf for leaf in known.values()}
    for variable, text in sorted((environment or {}).items()):
        if leaf := by_variable.get(variable):
            values[leaf.key] = _convert(leaf, text, f"from the environment variable {variable}", text=True)
            origins[leaf.key] = variable
        elif variable.startswith("BASALT_") and variable not in OTHER_VARIABLES:
            notes.append(f"environment variable {variable} is not a Basalt setting{_meant(variable, by_variable)}")
    for key, text in (flags or {}).items():
        values[key] = _convert(known[key], text, f"from {known[key].flag}", text=True)
        origins[key] = known[key].flag
    config = _build(Config, values)
    config.check()
    return Loaded(config, origins, notes)


def changed(before: Config, after: Config) -> tuple[Config, list[str], list[str]]:
    """Compute a reload. Return (new effective settings, keys applied, keys that require a restart)."""
    taken: list[str] = []
    waiting: list[str] = []
    values: dict[str, Any] = {}
    for leaf in leaves():
        old, new = value_of(before, leaf), value_of(after, leaf)
        values[leaf.key] = new if leaf.reload is Reload.LIVE else old
        if old != new:
            (taken if leaf.reload is Reload.LIVE else waiting).append(leaf.key)
    return _build(Config, values), taken, waiting


def describe(loaded: Loaded) -> str:
    """Return the settings as a TOML file with the description and the source of each one."""
    lines: list[str] = []
    table = ""
    for leaf in leaves():
        section = ".".join(leaf.path[:-1])
        if section != table:
            table = section
            lines += [f"[{section}]"]
        live = "; applied on SIGHUP" if leaf.reload is Reload.LIVE else ""
        lines.append(f"# {leaf.meaning} ({loaded.origins[leaf.key]}{live})")
        value = value_of(loaded.config, leaf)
        name = leaf.path[-1]
        if leaf.secret:
            lines.append(f'# {name} = "{MASK}"')
        elif value is None:
            lines.append(f'# {name} = ""')
        else:
            lines.append(f"{name} = {_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(file, "rb") as opened:
            raw = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfigError(f"cannot read the settings file {file}: {error.strerror}; check the path") from error
    if len(raw) > FILE_BYTES_MAX:
        raise InvalidConfigError(f"the settings file {file} is larger than {FILE_BYTES_MAX} bytes; check the path")
    try:
        return tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"the settings file {file} is not valid TOML: {error}") from error


def _flat(
    table: Mapping[str, Any], known: Mapping[str, Leaf], file: Path, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every setting in the file. Raises for an unknown key."""
    sections = {leaf.path[:depth] for leaf in known.values() for depth in range(1, len(leaf.path))}
    for name, value in table.items():
        here = (*path, name)
        key = ".".join(here)
        if here in sections:
            if not isinstance(value, dict):
                raise InvalidConfigError(f"{key} in {file} is a table; write [{key}] and its settings below")
            yield from _flat(value, known, file, here)
        elif key in known:
            yield key, value
        else:
            names = [*known, *(".".join(section) for section in sections)]
            raise InvalidConfigError(
                f"{key} in {file} is not a Basalt setting{_meant(key, names)} "
                "`basalt serve --print-config` lists them all"
            )


def _meant(given: str, names: Mapping[str, Any] | list[str]) -> str:
    close = difflib.get_close_matches(given, list(names), 1)
    return f"; did you mean {close[0]}?" if close else "."


def _convert(leaf: Leaf, value: Any, where: str, *, text: bool = False) -> Any:
    """Return the validated value of a leaf. `text` marks sources that only have strings."""
    if text:
        value = _from_text(leaf, value)
    elif isinstance(value, dict):
        raise InvalidConfigError(f"{leaf.key} {where} is a table, but it must be one value; {_example(leaf)}")
    try:
        if isinstance(leaf.default, Share):
            return Share.parse(value)
        return converter(leaf.type, strict=not text, dec_hook=_own_type)(value)
    except (msgspec.ValidationError, ValueError) as error:
        reason = "invalid value" if leaf.secret else _reason(error, value)
        raise InvalidConfigError(f"{leaf.key} {where}: {reason}; {_example(leaf)}") from error


def _reason(error: Exception, value: Any) -> str:
    """Return why a value is refused, in words instead of types of Python."""
    text = str(error).partition(" - at ")[0]
    found = _EXPECTED.fullmatch(text)
    if found is None:
        return text
    return f"expected {_TYPES.get(found['type'], found['type'])}{found['bounds'] or ''}, not {value!r:.80}"


def _from_text(leaf: Leaf, value: str) -> Any:
    if isinstance(leaf.default, tuple):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(leaf.default, bool) and value.lower() in {"yes", "on", "no", "off"}:
        return value.lower() in {"yes", "on"}
    return value


def _example(leaf: Leaf) -> str:
    kind = leaf.type.__origin__
    if get_origin(kind) is Literal:
        return "use one of " + ", ".join(get_args(kind))
    shown = '"..."' if leaf.secret or leaf.default is None else _toml(leaf.default)
    return f"for example {leaf.key} = {shown}"


def _own_type(kind: type, value: Any) -> Any:
    if kind is ByteCount:
        return ByteCount.parse(value)
    if kind is Path:
        if not isinstance(value, str) or not value:
            raise ValueError(f"expected a path, got {value!r}")
        return Path(value)
    raise NotImplementedError(kind)


def _build(tree: type[Any], values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Any:
    made: dict[str, Any] = {}
    for field in msgspec.structs.fields(tree):
        here = (*path, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Section):
            made[field.name] = _build(field.type, values, here)
        elif ".".join(here) in values:
            made[field.name] = values[".".join(here)]
    return tree(**made)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, ByteCount | Share | Path | str):
        return msgspec.json.encode(str(value)).decode()
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


Loader = Callable[[], Loaded]
"""Reads every source again, for a reload."""
