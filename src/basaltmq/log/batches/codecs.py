"""Decompresses and compresses Kafka record batches, by the codec number in their attributes.

    0 none    1 gzip    2 snappy    3 lz4 (frame format)    4 zstd

gzip comes with Python. The others need Arrow (the `arrow` extra). Without it, or for an unknown number, a batch can
still be read as bytes; only decoding or compressing it raises UnsupportedCodecError, which names the codec.

Snappy has two forms: raw, and the framing of a Java library that most producers use:

    | 0x82 "SNAPPY" 0 | version i32 | lowest version i32 | (length i32 | raw snappy)* |      big-endian

Output comes in pieces on demand, because a few KB can expand to gigabytes. Output beyond the caller's limit raises
LimitExceededError. Invalid input raises CorruptionError.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any, Final

from basaltmq.errors import CorruptionError, LimitExceededError, UnsupportedCodecError, install_hint
from basaltmq.varints import read_varint

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

NAMES: Final = {NONE: "none", GZIP: "gzip", SNAPPY: "snappy", LZ4: "lz4", ZSTD: "zstd"}

PIECE_BYTES: Final = 64 << 10
"""Largest output piece: large enough to hide the cost of a call, small enough for a reader of one record."""

INPUT_BYTES: Final = 16 << 10
"""Compressed bytes per zlib call, because zlib copies its unused input after every piece."""

_XERIAL: Final = b"\x82SNAPPY\x00"
_XERIAL_HEAD_BYTES: Final = 16
_I32: Final = Struct(">i")

SNAPPY_BLOCK_BYTES: Final = 32 << 10
_SNAPPY_LENGTH_BYTES_MAX: Final = 5
LZ4_BLOCK_BYTES: Final = 64 << 10
_LZ4_HEAD: Final = bytes.fromhex("04224d18 60 40 82")
"""Magic; version 1 with independent blocks; blocks of 64 KiB; the checksum of these two bytes."""
_LZ4_SIZE: Final = Struct("<I")
_LZ4_STORED: Final = 1 << 31
"""Marks a block that is not compressed."""


def pieces(codec: int, data: bytes, size_bytes_max: int) -> Iterator[bytes]:
    """Yield the content of a batch in pieces. Raises LimitExceededError beyond `size_bytes_max`."""
    known = _CODECS.get(codec)
    if known is None:
        raise UnsupportedCodecError(f"unknown Kafka compression {codec}; known codecs: {_listed()}")
    left = size_bytes_max
    for piece in known(data, size_bytes_max):
        left -= len(piece)
        if left < 0:
            raise _too_large(size_bytes_max)
        yield piece


def compress(codec: int, data: bytes, level: int | None = None) -> bytes:
    """Compress the content of a batch. `level` applies to gzip and zstd; None is the default of the codec."""
    if codec == NONE:
        return data
    if codec == GZIP:
        stream = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION if level is None else level, wbits=31)
        return stream.compress(data) + stream.flush()
    if codec == SNAPPY:
        return _compress_snappy(data)
    if codec == LZ4:
        return _compress_lz4(data)
    if codec == ZSTD:
        packed: bytes = _arrow(codec).Codec("zstd", compression_level=level).compress(data, asbytes=True)
        return packed
    raise UnsupportedCodecError(f"unknown Kafka compression {codec}; known codecs: {_listed()}")


def _compress_snappy(data: bytes) -> bytes:
    """Compress in the framing that all Kafka clients read."""
    snappy = _arrow(SNAPPY).Codec("snappy")
    parts = [_XERIAL, _I32.pack(1), _I32.pack(1)]
    for at in range(0, len(data), SNAPPY_BLOCK_BYTES):
        block = snappy.compress(data[at : at + SNAPPY_BLOCK_BYTES], asbytes=True)
        parts += (_I32.pack(len(block)), block)
    return b"".join(parts)


def _compress_lz4(data: bytes) -> bytes:
    """Compress as an LZ4 frame of independent blocks. Arrow's own frames link their blocks, which Java refuses."""
    lz4 = _arrow(LZ4).Codec("lz4_raw")
    parts = [_LZ4_HEAD]
    for at in range(0, len(data), LZ4_BLOCK_BYTES):
        block = data[at : at + LZ4_BLOCK_BYTES]
        packed = lz4.compress(block, asbytes=True)
        if len(packed) < len(block):
            parts += (_LZ4_SIZE.pack(len(packed)), packed)
        else:
            parts += (_LZ4_SIZE.pack(len(block) | _LZ4_STORED), block)
    parts.append(_LZ4_SIZE.pack(0))
    return b"".join(parts)


def _listed() -> str:
    return ", ".join(f"{number} ({name})" for number, name in NAMES.items())


def _gzip(data: bytes, _size_bytes_max: int) -> Iterator[bytes]:
    stream = zlib.decompressobj(wbits=31)
    at = 0
    given = b""
    while given or at < len(data):
        if not given:
            given = data[at : at + INPUT_BYTES]
            at += len(given)
        if stream.eof:
            # A gzip stream may consist of several members.
            stream = zlib.decompressobj(wbits=31)
        try:
            piece = stream.decompress(given, PIECE_BYTES)
        except zlib.error as error:
            raise CorruptionError(f"the batch is not valid gzip: {error}") from error
        given = stream.unused_data if stream.eof else stream.unconsumed_tail
        if piece:
            yield piece
    while not stream.eof:
        # All input is consumed, but the piece limit delays the rest of the output.
        piece = stream.decompress(b"", PIECE_BYTES)
        if not piece:
            raise CorruptionError("the gzip stream of a batch is truncated")
        yield piece


def _snappy(data: bytes, size_bytes_max: int) -> Iterator[bytes]:
    if not data.startswith(_XERIAL):
        yield _bare_snappy(data, size_bytes_max)
        return
    at = _XERIAL_HEAD_BYTES
    while at < len(data):
        if len(data) - at < _I32.size:
            raise CorruptionError("the snappy framing of a batch is truncated")
        length = _I32.unpack_from(data, at)[0]
        at += _I32.size
        if not 0 <= length <= len(data) - at:
            raise CorruptionError(f"the snappy framing of a batch claims {length} bytes, but has {len(data) - at}")
        yield _bare_snappy(data[at : at + length], size_bytes_max)
        at += length


def _bare_snappy(data: bytes, size_bytes_max: int) -> bytes:
    try:
        size, _ = read_varint(data[:_SNAPPY_LENGTH_BYTES_MAX], 0)
    except IndexError:
        raise CorruptionError("a snappy block of a batch has no valid length") from None
    if size > size_bytes_max:
        raise _too_large(size_bytes_max)
    arrow = _arrow(SNAPPY)
    try:
        raw: bytes = arrow.Codec("snappy").decompress(data, decompressed_size=size, asbytes=True)
    except (arrow.ArrowException, OSError, ValueError) as error:
        raise CorruptionError(f"the batch is not valid snappy: {error}") from error
    return raw


def _streamed(codec: int) -> Callable[[bytes, int], Iterator[bytes]]:
    def decompressed(data: bytes, _size_bytes_max: int) -> Iterator[bytes]:
        arrow = _arrow(codec)
        try:
            with arrow.CompressedInputStream(arrow.BufferReader(data), NAMES[codec]) as stream:
                while piece := stream.read(PIECE_BYTES):
                    yield piece
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise CorruptionError(f"the batch is not valid {NAMES[codec]}: {error}") from error

    return decompressed


def _plain(data: bytes, _size_bytes_max: int) -> Iterator[bytes]:
    yield data


def _arrow(codec: int) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UnsupportedCodecError(
            f"a batch compressed with {NAMES[codec]} cannot be decoded without pyarrow: {install_hint('arrow')}"
        ) from None
    return pyarrow


def _too_large(size_bytes_max: int) -> LimitExceededError:
    return LimitExceededError(
        f"a batch has over {size_bytes_max} bytes when decompressed; send smaller batches, or raise the topic's "
        "max.message.bytes"
    )


_CODECS: Final[dict[int, Callable[[bytes, int], Iterator[bytes]]]] = {
    NONE: _plain,
    GZIP: _gzip,
    SNAPPY: _snappy,
    LZ4: _streamed(LZ4),
    ZSTD: _streamed(ZSTD),
}
