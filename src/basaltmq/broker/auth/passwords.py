"""Password hashing with scrypt and verification in constant time. Passwords are never stored or shown.

    scrypt$<log2 n>$<r>$<p>$<salt, base64>$<hash, base64>
    rabbit-sha256$<base64 of a 4-byte salt and the hash of salt and password>       from RabbitMQ's definitions
    rabbit-sha512$<the same with SHA-512>
    -                                                                               no password: no login by password

RabbitMQ hashes in imported definitions are stored unchanged. At the user's next login with the password, the hash is
replaced by a scrypt hash.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Callable
from typing import Final

from basaltmq.errors import InvalidArgumentError

NONE: Final = "-"

LOG2_N: Final = 14
R: Final = 8
P: Final = 1
"""scrypt parameters: 16 MiB and about 40 ms per check. A person does not notice it; a dictionary attack is costly."""

SALT_BYTES: Final = 16
HASH_BYTES: Final = 32
PASSWORD_BYTES_MAX: Final = 1024
"""Longer passwords add no security and cost time to hash."""

MEMORY_BYTES_MAX: Final = 64 << 20
"""Memory limit of one check, whatever parameters the stored hash has."""

_RABBIT: Final = {
    "rabbit_password_hashing_sha256": "rabbit-sha256",
    "rabbit_password_hashing_sha512": "rabbit-sha512",
}
_RABBIT_HASHES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "rabbit-sha256": lambda raw: hashlib.sha256(raw).digest(),
    "rabbit-sha512": lambda raw: hashlib.sha512(raw).digest(),
}
_RABBIT_SALT_BYTES: Final = 4


def hash_password(password: str, random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    raw = check_password(password)
    salt = random_bytes(SALT_BYTES)
    made = hashlib.scrypt(raw, salt=salt, n=1 << LOG2_N, r=R, p=P, dklen=HASH_BYTES, maxmem=MEMORY_BYTES_MAX)
    return f"scrypt${LOG2_N}${R}${P}${_text(salt)}${_text(made)}"


def check_password(password: str) -> bytes:
    """Validate a password and return its bytes."""
    try:
        raw = password.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgumentError("invalid password: it must be Unicode text") from None
    if not raw:
        raise InvalidArgumentError("invalid password: it must have at least one character")
    if len(raw) > PASSWORD_BYTES_MAX:
        raise InvalidArgumentError(f"invalid password: it must have at most {PASSWORD_BYTES_MAX} bytes")
    return raw


def rabbit_hash(algorithm: str, password_hash: str) -> str:
    """Convert a hash from RabbitMQ's definitions to our format."""
    if not password_hash:
        return NONE
    kind = _RABBIT.get(algorithm or "rabbit_password_hashing_sha256")
    if kind is None:
        raise InvalidArgumentError(f"cannot import password hashes of {algorithm!r:.80}; set a password instead")
    try:
        raw = base64.b64decode(password_hash, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgumentError("invalid password hash: it must be base64 text") from None
    if len(raw) != _RABBIT_SALT_BYTES + len(_RABBIT_HASHES[kind](b"")):
        raise InvalidArgumentError(f"invalid password hash: {len(raw)} bytes is not the length of {algorithm}")
    return f"{kind}${password_hash}"


def is_hash(stored: str) -> bool:
    """Whether this is a hash in one of our formats."""
    if stored == NONE:
        return True
    kind, _, rest = stored.partition("$")
    return kind in ("scrypt", *_RABBIT_HASHES) and bool(rest)


def verify(stored: str, password: str) -> bool:
    """Whether the password matches the hash.

    The time does not depend on the kind of hash: for other kinds, a scrypt hash is computed in addition.
    """
    raw = password.encode(errors="replace")
    if not raw or len(raw) > PASSWORD_BYTES_MAX:
        return False
    is_right = _is_right(stored, raw)
    if is_outdated(stored) or is_right is None:
        hashlib.scrypt(raw, salt=bytes(SALT_BYTES), n=1 << LOG2_N, r=R, p=P, dklen=HASH_BYTES, maxmem=MEMORY_BYTES_MAX)
    return is_right is True


def _is_right(stored: str, raw: bytes) -> bool | None:
    """Whether the password matches; None if the hash is invalid."""
    kind, _, rest = stored.partition("$")
    try:
        if kind == "scrypt":
            log2_n, r, p, salt, wanted = rest.split("$")
            expected = base64.b64decode(wanted)
            made = hashlib.scrypt(
                raw,
                salt=base64.b64decode(salt),
                n=1 << int(log2_n),
                r=int(r),
                p=int(p),
                dklen=len(expected),
                maxmem=MEMORY_BYTES_MAX,
            )
            return hmac.compare_digest(made, expected)
        hashed = _RABBIT_HASHES.get(kind)
        if hashed is None:
            return None
        whole = base64.b64decode(rest)
        salted, expected = whole[:_RABBIT_SALT_BYTES], whole[_RABBIT_SALT_BYTES:]
        return hmac.compare_digest(hashed(salted + raw), expected)
    except (ValueError, binascii.Error, MemoryError):
        return None


def unmatched(random_bytes: Callable[[int], bytes] = os.urandom) -> str:
    """Return a random hash of the usual cost that no known password matches."""
    return f"scrypt${LOG2_N}${R}${P}${_text(random_bytes(SALT_BYTES))}${_text(random_bytes(HASH_BYTES))}"


def is_outdated(stored: str) -> bool:
    """Whether the hash should be replaced at the next login."""
    return stored != NONE and not stored.startswith(f"scrypt${LOG2_N}${R}${P}$")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
