"""Decoders of msgspec types. Only this module builds type information.

msgspec builds the type information of a Struct or an enumeration when a decoder for it is first made, and stores it on
the class. The construction runs Python code, so the GIL may change hands in the middle. A second thread then reads the
unfinished information, and the process dies with SIGSEGV. `msgspec.convert` and `decode(..., type=...)` have the same
defect, because they build on their first call.

So each decoder is created once, at import, next to its class. A lock covers the construction, because two threads may
import two modules that share a type. Using a finished decoder needs no lock. Encoding needs no type information.
`tests/style/test_decoding.py` forbids other ways.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_BUILDING: Final = threading.Lock()


def json_decoder(kind: type[T], *, strict: bool = True) -> Callable[[bytes | bytearray | memoryview | str], T]:
    """Decode JSON to `kind`. Without `strict`, numbers and booleans may be strings."""
    with _BUILDING:
        return msgspec.json.Decoder(kind, strict=strict).decode


def msgpack_decoder(kind: type[T]) -> Callable[[bytes | bytearray | memoryview], T]:
    """Decode MessagePack to `kind`."""
    with _BUILDING:
        return msgspec.msgpack.Decoder(kind).decode


def converter(
    kind: type[T], *, strict: bool = True, dec_hook: Callable[[type, Any], Any] | None = None
) -> Callable[[Any], T]:
    """Convert plain Python values to `kind`. `dec_hook` converts types that msgspec does not know."""
    with _BUILDING:
        # `convert` has no object that keeps its type, but it uses the information that a decoder left on the classes.
        msgspec.msgpack.Decoder(kind)

    def convert(value: Any) -> T:
        return msgspec.convert(value, kind, strict=strict, dec_hook=dec_hook)

    return convert
