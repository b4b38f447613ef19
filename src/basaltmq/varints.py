"""Unsigned varints in base 128, least significant group first, as in Protobuf, Kafka, MQTT and RocksDB."""

from __future__ import annotations


def varint(value: int) -> bytes:
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


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at `at`, and the position after it.

    Raises IndexError if the data ends inside the number, or if it has more than 64 bits.
    """
    shift = value = 0
    while shift < 64:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError
