"""A self-signed certificate for clients that use TLS and do not verify it.

RocketMQ's Java and Go clients do so by default. If the operator has set no certificate, the broker creates this one,
once, in a file of the node. It provides encryption but no authentication. OpenSSL does the rest of TLS. Only the key
pair (P-256) and the signature of the certificate are calculated here, because Python's ssl module cannot create
certificates. The signature is calculated once, without a client, so its timing reveals nothing.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

# The curve P-256 of FIPS 186-4.
_P: Final = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G: Final = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int] | None
"""None is the point at infinity."""

NAME: Final = "basalt"
VALID_S: Final = 10 * 365 * 86_400
_HEX_BYTES: Final = 32

_EC_KEY: Final = bytes.fromhex("06072a8648ce3d0201")
_P256: Final = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_SHA256: Final = bytes.fromhex("300a06082a8648ce3d040302")
_COMMON_NAME: Final = bytes.fromhex("0603550403")
_ALT_NAMES: Final = bytes.fromhex("0603551d11")


def certificate_file(file: Path) -> Path:
    """Return a PEM file with a key and a certificate, which is made if it is missing."""
    if file.exists():
        return file
    draft = file.with_name(f"{file.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, made_pem(time.time()).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(draft, file)
    return file


def made_pem(now_s: float) -> str:
    """Return a new private key and its certificate, in PEM."""
    private = secrets.randbelow(_N - 1) + 1
    public = _times(private, _G)
    assert public is not None, "a key below the order of the curve has a public point"
    point = b"\x04" + b"".join(each.to_bytes(_HEX_BYTES, "big") for each in public)
    key = _sequence(
        _integer(1),
        _tagged(0x04, private.to_bytes(_HEX_BYTES, "big")),
        _tagged(0xA0, _P256),
        _tagged(0xA1, _bits(point)),
    )
    name = _sequence(_tagged(0x31, _sequence(_COMMON_NAME, _tagged(0x0C, NAME.encode()))))
    alt_names = _sequence(_tagged(0x82, b"localhost"), _tagged(0x87, bytes((127, 0, 0, 1))))
    body = _sequence(
        _tagged(0xA0, _integer(2)),
        _integer(secrets.randbits(120)),
        _ECDSA_SHA256,
        name,
        _sequence(_time(now_s - 86_400), _time(now_s + VALID_S)),
        name,
        _sequence(_sequence(_EC_KEY, _P256), _bits(point)),
        _tagged(0xA3, _sequence(_sequence(_ALT_NAMES, _tagged(0x04, alt_names)))),
    )
    certificate = _sequence(body, _ECDSA_SHA256, _bits(_signature(private, body)))
    return _pem("EC PRIVATE KEY", key) + _pem("CERTIFICATE", certificate)


def _signature(private: int, body: bytes) -> bytes:
    digest = int.from_bytes(hashlib.sha256(body).digest(), "big")
    while True:
        nonce = secrets.randbelow(_N - 1) + 1
        point = _times(nonce, _G)
        first = 0 if point is None else point[0] % _N
        second = pow(nonce, -1, _N) * (digest + first * private) % _N
        if first and second:
            return _sequence(_integer(first), _integer(second))


def _times(factor: int, point: Point) -> Point:
    found: Point = None
    while factor:
        if factor & 1:
            found = _plus(found, point)
        point = _plus(point, point)
        factor >>= 1
    return found


def _plus(left: Point, right: Point) -> Point:
    if left is None or right is None:
        return left or right
    if left[0] == right[0] and (left[1] + right[1]) % _P == 0:
        return None
    if left == right:
        slope = (3 * left[0] * left[0] - 3) * pow(2 * left[1], -1, _P) % _P
    else:
        slope = (right[1] - left[1]) * pow(right[0] - left[0], -1, _P) % _P
    x = (slope * slope - left[0] - right[0]) % _P
    return x, (slope * (left[0] - x) - left[1]) % _P


def _tagged(tag: int, content: bytes) -> bytes:
    """Encode a value in DER: its tag, its length, its content."""
    size = len(content)
    if size < 0x80:
        length = bytes((size,))
    else:
        raw = size.to_bytes((size.bit_length() + 7) // 8, "big")
        length = bytes((0x80 | len(raw),)) + raw
    return bytes((tag,)) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(number: int) -> bytes:
    return _tagged(0x02, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _tagged(0x03, b"\0" + content)


def _time(at_s: float) -> bytes:
    return _tagged(0x17, time.strftime("%y%m%d%H%M%SZ", time.gmtime(at_s)).encode())


def _pem(label: str, raw: bytes) -> str:
    text = base64.encodebytes(raw).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"
