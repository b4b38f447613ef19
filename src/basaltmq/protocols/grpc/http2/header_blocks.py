"""Header blocks (HPACK, RFC 7541): decoding with a cache that all connections share, and stateless encoding.

Our SETTINGS disable the peer's dynamic table (HEADER_TABLE_SIZE 0). The peer confirms this with a size update in its
next header block. From then on equal bytes mean equal fields, on any connection. The calls of one client to one method
send the same block, so the parsed fields are looked up by the bytes of the block. Hashing about 200 bytes replaces 40
us of decoding. Until the peer confirms, the table has its default size and every block is decoded.

Without a table, a small block cannot expand to large fields either.

Sent blocks use literals without indexing, so they do not depend on earlier blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from basaltmq.protocols.grpc.http2.faults import ConnectionFault
from basaltmq.protocols.grpc.http2.frames import Code

LIST_BYTES_MAX: Final = 16_384
"""Size of all fields of one block as HPACK counts it: name, value and 32 bytes each. An API key and the usual metadata
of a call take less than 1 KiB."""

CACHED_BLOCKS_MAX: Final = 1_024
"""Cached blocks: one for each combination of method and kind of client."""

CACHED_BLOCK_BYTES_MAX: Final = 1_024
"""Larger blocks are not cached."""

Field = tuple[str, str]
F = TypeVar("F")


class HeaderCache(Generic[F]):
    """Parsed fields by header block, shared by all connections of a server or a channel."""

    def __init__(self, read: Callable[[list[Field]], F]) -> None:
        """`read` parses fields into an `F`. It must not raise."""
        self.read = read
        self.known: dict[bytes, F] = {}

    def keep(self, block: bytes, parsed: F) -> None:
        if len(block) <= CACHED_BLOCK_BYTES_MAX:
            if len(self.known) >= CACHED_BLOCKS_MAX:
                self.known.clear()
            self.known[block] = parsed


class BlockReader(Generic[F]):
    """Decodes the header blocks of one connection, in order."""

    __slots__ = ("_cache", "_decoder", "_is_stateless", "_was_acked")

    def __init__(self, header_cache: HeaderCache[F]) -> None:
        self._cache = header_cache
        self._decoder = Decoder(LIST_BYTES_MAX)
        self._is_stateless = False
        self._was_acked = False

    def acked(self) -> None:
        """Record that the peer acknowledged our SETTINGS. The cache is used once it also sends the size update. A peer
        that never sends it is decoded normally."""
        self._was_acked = True

    def read(self, block: bytes) -> F:
        """Return the parsed fields of a block. Raise ConnectionFault if it is malformed: the decoder state is lost."""
        if self._is_stateless:
            known = self._cache.known.get(block)
            if known is not None:
                return known
        try:
            raw = self._decoder.decode(block, raw=True)
            found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
        except OversizedHeaderListError:
            raise ConnectionFault(Code.ENHANCE_YOUR_CALM, f"the header fields exceed {LIST_BYTES_MAX} bytes") from None
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"malformed header block: {error!s:.200}") from None
        except (IndexError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"malformed header block: {error!s:.200}") from None
        parsed = self._cache.read(found)
        if self._is_stateless:
            self._cache.keep(block, parsed)
        elif self._was_acked and self._decoder.header_table_size == 0:
            self._is_stateless = True
            self._decoder.max_allowed_table_size = 0
        return parsed


def encode(fields: Iterable[Field]) -> bytes:
    """Return a block of literals without indexing and without Huffman coding.

    | 0000 0000 | 0 length (7+) | name | 0 length (7+) | value |
    """
    parts: list[bytes] = []
    for name, value in fields:
        raw_name, raw_value = name.encode("latin-1"), value.encode("latin-1")
        parts += (b"\x00", _length(len(raw_name)), raw_name, _length(len(raw_value)), raw_value)
    return b"".join(parts)


def _length(number: int) -> bytes:
    """Return an HPACK integer with a 7-bit prefix."""
    if number < 0x7F:
        return bytes((number,))
    made = bytearray((0x7F,))
    number -= 0x7F
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
