"""Length-prefixed gRPC messages in the content of a stream.

| compressed u8 | length u32 | message (length) |   | compressed u8 | ...

A compressed message stays as it arrived until its reader inflates it. Because 64 KB of gzip can expand to 64 MiB,
inflating on arrival would let a client fill the memory and block the event loop.
"""

from __future__ import annotations

import zlib
from collections import deque
from struct import Struct
from typing import Final, NamedTuple

from basaltmq.protocols.frame_buffer import add_part
from basaltmq.protocols.grpc.http2.events import Chunk

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size

_GZIP: Final = zlib.MAX_WBITS | 16


class MessageTooLarge(Exception):
    """A message exceeds the size limit. Nothing of it is kept."""


class BadMessage(Exception):
    """A message violates the gRPC framing or its compression is invalid."""


class Compressed(NamedTuple):
    """A gzip message as it arrived."""

    raw: bytes

    def inflated(self, bytes_max: int) -> bytes:
        """Return the message. Raise MessageTooLarge beyond `bytes_max`, BadMessage if it is not valid gzip."""
        decoder = zlib.decompressobj(_GZIP)
        try:
            found = decoder.decompress(self.raw, bytes_max + 1)
        except zlib.error:
            raise BadMessage("a message is marked as gzip, but is not valid gzip") from None
        if len(found) > bytes_max:
            raise MessageTooLarge(
                f"a message exceeds the limit of {bytes_max} bytes when decompressed; send smaller batches, or do not "
                "compress them"
            )
        if not decoder.eof or decoder.unused_data:
            raise BadMessage("a message is marked as gzip, but is not exactly one gzip member")
        return found


def prefix(message: bytes) -> bytes:
    """Return the prefix of an uncompressed message."""
    return PREFIX.pack(0, len(message))


class Messages:
    """Reassembles messages from the chunks of a stream."""

    __slots__ = ("_bytes_max", "_encoding", "_have", "_need", "_parts", "ready")

    def __init__(self, bytes_max: int, encoding: str) -> None:
        self._bytes_max = bytes_max
        self._encoding = encoding
        self._parts: list[Chunk] = []
        self._have = 0
        self._need = PREFIX_BYTES
        """Bytes needed before parsing can continue: a prefix, or a prefix and its message."""
        self.ready: deque[bytes | Compressed] = deque()
        """Complete messages, in order."""

    @property
    def held_bytes(self) -> int:
        """Buffered bytes of the incomplete message."""
        return self._have

    def ready_bytes(self) -> int:
        """Bytes of the complete messages."""
        return sum(len(each) if isinstance(each, bytes) else len(each.raw) for each in self.ready)

    def add(self, chunk: Chunk) -> None:
        parts = self._parts
        add_part(parts, chunk)
        self._have += len(chunk)
        if self._have < self._need:
            return
        buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        position = 0
        while self._have - position >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(buffer, position)
            if length > self._bytes_max:
                raise MessageTooLarge(f"a message of {length} bytes exceeds the limit of {self._bytes_max} bytes")
            self._need = PREFIX_BYTES + length
            if self._have - position < self._need:
                break
            start = position + PREFIX_BYTES
            position = start + length
            self.ready.append(self._checked(flag, bytes(buffer[start:position])))
            self._need = PREFIX_BYTES
        self._parts = [bytes(buffer[position:])] if position else [buffer]
        self._have -= position

    def end(self) -> None:
        """Raise BadMessage if the stream ended within a message."""
        if self._have:
            raise BadMessage("the call ended within a message")

    def _checked(self, flag: int, message: bytes) -> bytes | Compressed:
        if not flag:
            return message
        if flag != 1 or self._encoding != "gzip":
            raise BadMessage("a message is marked as compressed, but the call has no grpc-encoding: gzip")
        return Compressed(message)
