"""Decompression of Kafka record batches, by the number in their attributes.

    0 none    1 gzip    2 snappy    3 lz4 (frame format)    4 zstd

gzip comes with Python. The others are Arrow's (the `arrow` extra); without it, or for a number nobody knows, a batch
stays readable as the bytes it is, and only looking into it is an UnsupportedCodecError that names the codec.

Snappy comes in two forms: bare, and in the framing of a Java library, which most producers use:

    | 0x82 "SNAPPY" 0 | version i32 | lowest version i32 | (length i32 | bare snappy)* |     big-endian

Invariants: what comes out is never larger than DECOMPRESSED_BYTES_MAX, whatever the input claims, and input that is not
what it says is a CorruptionError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from struct import Struct
from typing import Any, Final

from basaltmq.errors import CorruptionError, LimitExceededError, UnsupportedCodecError

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

NAMES: Final = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

DECOMPRESSED_BYTES_MAX: Final = 128 << 20
"""Of one batch: twice the largest that is accepted uncompressed. A few KB can claim to be gigabytes."""

_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD_BYTES: Final = 16
_I32: Final = Struct(">i")


def decompress(codec: int, data: bytes) -> bytes:
    """The content of a batch."""
    known = _CODECS.get(codec)
    if known is None:
        raise UnsupportedCodecError(f"compression {codec} is not one Kafka defines; {_listed()} are")
    return known(data)


def _listed() -> str:
    return ", ".join(f"{number} ({name})" for number, name in NAMES.items())


def _gzip(data: bytes) -> bytes:
    parts: list[bytes] = []
    size = 0
    # A gzip stream may be several, one after the other.
    while data:
        stream = zlib.decompressobj(wbits=31)
        try:
            part = stream.decompress(data, DECOMPRESSED_BYTES_MAX - size + 1)
        except zlib.error as error:
            raise CorruptionError(f"a batch is not the gzip it says: {error}") from error
        size += len(part)
        if size > DECOMPRESSED_BYTES_MAX:
            raise _too_large()
        if not stream.eof:
            raise CorruptionError("a batch's gzip stream ends too early")
        parts.append(part)
        data = stream.unused_data
    return b"".join(parts)


def _snappy(data: bytes) -> bytes:
    if not data.startswith(_XERIAL):
        return _bare_snappy(data, DECOMPRESSED_BYTES_MAX)
    parts: list[bytes] = []
    left = DECOMPRESSED_BYTES_MAX
    at = _XERIAL_HEAD_BYTES
    while at < len(data):
        if len(data) - at < _I32.size:
            raise CorruptionError("a batch's snappy framing ends too early")
        length = _I32.unpack_from(data, at)[0]
        at += _I32.size
        if not 0 <= length <= len(data) - at:
            raise CorruptionError(f"a batch's snappy framing says {length} bytes, {len(data) - at} are there")
        parts.append(_bare_snappy(data[at : at + length], left))
        left -= len(parts[-1])
        at += length
    return b"".join(parts)


def _bare_snappy(data: bytes, size_bytes_max: int) -> bytes:
    size = shift = 0
    for byte in data[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    else:
        raise CorruptionError("a batch's snappy block does not say how long it is")
    if size > size_bytes_max:
        raise _too_large()
    arrow = _arrow(SNAPPY)
    try:
        raw: bytes = arrow.Codec("snappy").decompress(data, decompressed_size=size, asbytes=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"a batch is not the snappy it says: {error}") from error
    return raw


def _streamed(codec: int) -> Callable[[bytes], bytes]:
    def decompressed(data: bytes) -> bytes:
        arrow = _arrow(codec)
        try:
            with arrow.CompressedInputStream(arrow.BufferReader(data), NAMES[codec]) as stream:
                raw: bytes = stream.read(DECOMPRESSED_BYTES_MAX + 1)
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise CorruptionError(f"a batch is not the {NAMES[codec]} it says: {error}") from error
        if len(raw) > DECOMPRESSED_BYTES_MAX:
            raise _too_large()
        return raw

    return decompressed


def _arrow(codec: int) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UnsupportedCodecError(
            f"a batch compressed with {NAMES[codec]} cannot be looked into without pyarrow; install basaltmq[arrow]"
        ) from None
    return pyarrow


def _too_large() -> LimitExceededError:
    return LimitExceededError(f"a batch is over {DECOMPRESSED_BYTES_MAX} bytes when decompressed; send smaller ones")


_CODECS: Final[dict[int, Callable[[bytes], bytes]]] = {
    NONE: lambda data: data,
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _streamed(LZ4),
    ZSTD: _streamed(ZSTD),
}
