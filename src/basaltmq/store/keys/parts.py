"""Parts of keys: length-prefixed strings, ranges of a prefix, and checks of decoded keys.

Layouts:

    lp(x)            | u16 length | bytes |
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from basaltmq.errors import CorruptionError, InvalidArgumentError
from basaltmq.ids import ID_BYTES

STRING_BYTES_MAX: Final = 0xFFFF
"""Largest length that fits a u16."""

_U16: Final = Struct(">H")
U64: Final = Struct(">Q")

SIGN: Final = 1 << 63
"""Added to signed numbers, so that negative ones sort first."""


def prefix_range(prefix: bytes) -> tuple[bytes, bytes | None]:
    """Return the range [start, end) of all keys that start with `prefix`. The end is None if no key is above."""
    stripped = prefix.rstrip(b"\xff")
    if not stripped:
        return prefix, None
    return prefix, stripped[:-1] + bytes((stripped[-1] + 1,))


def lp(value: str | bytes) -> bytes:
    """Length-prefix a string for use inside a key."""
    raw = _utf8(value) if isinstance(value, str) else value
    size = len(raw)
    if size > STRING_BYTES_MAX:
        raise InvalidArgumentError(f"a name of {size} bytes is too long: at most {STRING_BYTES_MAX} bytes of UTF-8")
    return _U16.pack(size) + raw


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"a name is not Unicode text: character {error.start} is half of a surrogate pair"
        ) from None


def take_lp(key: bytes, at: int) -> tuple[bytes, int]:
    """Return the length-prefixed bytes at `at`, and the position of the next part."""
    begin = at + 2
    if begin > len(key):
        raise malformed(key)
    end = begin + int.from_bytes(key[at:begin], "big")
    if end > len(key):
        raise malformed(key)
    return key[begin:end], end


def take_text(key: bytes, at: int) -> tuple[str, int]:
    raw, at = take_lp(key, at)
    try:
        return raw.decode(), at
    except UnicodeDecodeError:
        raise malformed(key) from None


def malformed(key: bytes) -> CorruptionError:
    shown = key[:48].hex() + ("..." if len(key) > 48 else "")
    return CorruptionError(f"a key of {len(key)} bytes has no known layout: {shown}")


def exactly(key: bytes, size: int) -> None:
    if len(key) != size:
        raise malformed(key)


def sized_id(message_id: bytes) -> bytes:
    assert len(message_id) == ID_BYTES, f"a message id has 16 bytes, not {len(message_id)}"
    return message_id


def unprefixed(name: str) -> bytes:
    """Encode a key that is a single string. Without a length prefix it sorts as text and can be listed by prefix."""
    return lp(name)[2:]


def decode_unprefixed(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise malformed(key) from None
