"""Protobuf varints, for messages that are encoded by hand."""

from __future__ import annotations


def varint(value: int) -> bytes:
    """Return the value in base 128, least significant group first."""
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
