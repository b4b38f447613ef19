"""Numbers as protobuf writes them, for messages that are put together without it."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    if value < 0x80:
        return bytes((value,))
    if value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    made = bytearray()
    while value >= 0x80:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)
