"""Header blocks (HPACK, RFC 7541): decoded once for every connection that sends the same bytes, encoded statelessly.

We tell the other side to keep no table (SETTINGS_HEADER_TABLE_SIZE 0). Once it does, which its first block after our
settings says with a size update, a block means the same wherever and whenever it comes. gRPC calls of one method and
one client have the same block, so what it means is looked up by its bytes: a hash of some 200 bytes instead of 40 us of
decoding. Until then the table is there, with the default size, and blocks are decoded one by one.

Without a table no small block can stand for large fields, either.

What is sent is encoded as literals that are not to be indexed, so it depends on nothing that was sent before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from basaltmq.protocols.grpc.http2.faults import ConnectionFault
from basaltmq.protocols.grpc.http2.frames import Code

LIST_BYTES_MAX: Final = 16_384
"""All fields of one block, as HPACK counts them (32 bytes beside each name and value). An API key and the usual
metadata of a call are less than one."""

KEPT_MAX: Final = 1_024
"""Blocks remembered: calls times clients of different kinds."""

KEPT_BYTES_MAX: Final = 1_024
"""Larger ones are decoded every time."""

Field = tuple[str, str]
F = TypeVar("F")


class Meanings(Generic[F]):
    """What blocks mean that depend on no table; shared by all connections of a server or a client."""

    def __init__(self, read: Callable[[list[Field]], F]) -> None:
        """`read` makes of fields what their user wants of them, and must not raise."""
        self.read = read
        self.known: dict[bytes, F] = {}

    def keep(self, block: bytes, meaning: F) -> None:
        if len(block) <= KEPT_BYTES_MAX:
            if len(self.known) >= KEPT_MAX:
                self.known.clear()
            self.known[block] = meaning


class BlockReader(Generic[F]):
    """Reads the blocks of one connection, in their order."""

    __slots__ = ("_decoder", "_is_stateless", "_meanings", "_was_acked")

    def __init__(self, meanings: Meanings[F]) -> None:
        self._meanings = meanings
        self._decoder = Decoder(LIST_BYTES_MAX)
        self._is_stateless = False
        self._was_acked = False

    def acked(self) -> None:
        """The other side knows that it is to keep no table. It has to say that it does; who never says so and has
        nothing in its table does no harm."""
        self._was_acked = True

    def read(self, block: bytes) -> F:
        """What a block means; ConnectionFault if it cannot be told, after which no other can."""
        if self._is_stateless:
            known = self._meanings.known.get(block)
            if known is not None:
                return known
        try:
            raw = self._decoder.decode(block, raw=True)
            found = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in raw]
        except OversizedHeaderListError:
            raise ConnectionFault(
                Code.ENHANCE_YOUR_CALM, f"the header fields are more than {LIST_BYTES_MAX} bytes"
            ) from None
        except HPACKError as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"a header block cannot be read: {error!s:.200}") from None
        except (IndexError, ValueError) as error:
            raise ConnectionFault(Code.COMPRESSION_ERROR, f"a header block cannot be read: {error!s:.200}") from None
        meaning = self._meanings.read(found)
        if self._is_stateless:
            self._meanings.keep(block, meaning)
        elif self._was_acked and self._decoder.header_table_size == 0:
            self._is_stateless = True
            self._decoder.max_allowed_table_size = 0
        return meaning


def encode(fields: Iterable[Field]) -> bytes:
    """A block of literals without indexing, without Huffman's code.

    | 0000 0000 | 0 length (7+) | name | 0 length (7+) | value |
    """
    parts: list[bytes] = []
    for name, value in fields:
        raw_name, raw_value = name.encode("latin-1"), value.encode("latin-1")
        parts += (b"\x00", _length(len(raw_name)), raw_name, _length(len(raw_value)), raw_value)
    return b"".join(parts)


def _length(number: int) -> bytes:
    """An integer with a prefix of seven bits."""
    if number < 0x7F:
        return bytes((number,))
    made = bytearray((0x7F,))
    number -= 0x7F
    while number >= 0x80:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    made.append(number)
    return bytes(made)
