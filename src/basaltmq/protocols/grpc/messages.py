"""Messages of a call in the content of its stream.

| compressed u8 | length u32 | message (length) |   | compressed u8 | ...
"""

from __future__ import annotations

import zlib
from collections import deque
from struct import Struct
from typing import Final

from basaltmq.protocols.grpc.http2.events import Chunk

PREFIX: Final = Struct(">BI")
PREFIX_BYTES: Final = PREFIX.size

PART_BYTES_MIN: Final = 4_096
"""Two parts side by side have more than this, so that a sender of single bytes does not cost an object for each."""

_GZIP: Final = zlib.MAX_WBITS | 16


class MessageTooLarge(Exception):
    """Over the limit; nothing of it is kept."""


class BadMessage(Exception):
    """Not what the rules say."""


def prefix(message: bytes) -> bytes:
    """What comes before a message."""
    return PREFIX.pack(0, len(message))


def prefixed(message: bytes) -> bytes:
    return PREFIX.pack(0, len(message)) + message


class Messages:
    """Puts messages together from the parts that arrive."""

    __slots__ = ("_bytes_max", "_encoding", "_have", "_need", "_parts", "ready")

    def __init__(self, bytes_max: int, encoding: str) -> None:
        self._bytes_max = bytes_max
        self._encoding = encoding
        self._parts: list[Chunk] = []
        self._have = 0
        self._need = PREFIX_BYTES
        """Bytes before there is anything to do: a prefix, or a prefix and its message."""
        self.ready: deque[bytes] = deque()
        """Whole messages, in their order."""

    @property
    def held_bytes(self) -> int:
        """Of a message that is not whole."""
        return self._have

    def add(self, chunk: Chunk) -> None:
        parts = self._parts
        if parts and len(parts[-1]) + len(chunk) <= PART_BYTES_MIN:
            parts[-1] = bytes(parts[-1]) + chunk
        else:
            parts.append(chunk)
        self._have += len(chunk)
        if self._have < self._need:
            return
        buffer = parts[0] if len(parts) == 1 else b"".join(parts)
        position = 0
        while self._have - position >= PREFIX_BYTES:
            flag, length = PREFIX.unpack_from(buffer, position)
            if length > self._bytes_max:
                raise MessageTooLarge(f"a message of {length} bytes is over the limit of {self._bytes_max}")
            self._need = PREFIX_BYTES + length
            if self._have - position < self._need:
                break
            start = position + PREFIX_BYTES
            position = start + length
            self.ready.append(self.decoded(flag, bytes(buffer[start:position])))
            self._need = PREFIX_BYTES
        self._parts = [bytes(buffer[position:])] if position else [buffer]
        self._have -= position

    def end(self) -> None:
        """Nothing more comes."""
        if self._have:
            raise BadMessage("the call ended in the middle of a message")

    def decoded(self, flag: int, message: bytes) -> bytes:
        """A message as it was before it was compressed, if it was."""
        if not flag:
            return message
        if flag != 1 or self._encoding != "gzip":
            raise BadMessage("a message is marked as compressed, and the call does not say how")
        decoder = zlib.decompressobj(_GZIP)
        try:
            found = decoder.decompress(message, self._bytes_max + 1)
        except zlib.error:
            raise BadMessage("a message is marked as compressed with gzip and is not") from None
        if len(found) > self._bytes_max:
            raise MessageTooLarge(f"a message is over the limit of {self._bytes_max} bytes when it is unpacked")
        if not decoder.eof or decoder.unused_data:
            raise BadMessage("a message is marked as compressed with gzip and is not one piece of it")
        return found
