"""SCRAM credentials (RFC 5802, 7677): enough to verify a client's proof, but not to create one.

    salted password   PBKDF2 of the password with a salt and an iteration count; computed by the client
    stored key        H(HMAC(salted password, "Client Key"))
    server key        HMAC(salted password, "Server Key")

The hashes of `passwords` cannot be used for SCRAM. PBKDF2 with a few thousand iterations is cheaper to attack than they
are. So setting a password creates no SCRAM credential: an administrator must set one, and a password change deletes it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any, Final, NamedTuple

from basaltmq.errors import InvalidArgumentError

SHA_256: Final = "SCRAM-SHA-256"
SHA_512: Final = "SCRAM-SHA-512"
HASHES: Final = {SHA_256: "sha256", SHA_512: "sha512"}

ITERATIONS_MIN: Final = 4096
"""The minimum of RFC 7677."""

ITERATIONS_MAX: Final = 16_384
"""The limit of Apache Kafka. The client computes them at each login."""

SALT_BYTES_MAX: Final = 256


class ScramCredential(NamedTuple):
    """The credential of one user for one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def row(self) -> dict[str, Any]:
        """Return the form stored in the user's attributes."""
        return {
            "salt": base64.b64encode(self.salt).decode(),
            "iterations": self.iterations,
            "stored_key": base64.b64encode(self.stored_key).decode(),
            "server_key": base64.b64encode(self.server_key).decode(),
        }


def of_row(row: dict[str, Any]) -> ScramCredential:
    return ScramCredential(
        base64.b64decode(row["salt"]),
        int(row["iterations"]),
        base64.b64decode(row["stored_key"]),
        base64.b64decode(row["server_key"]),
    )


def of_salted(mechanism: str, salt: bytes, iterations: int, salted_password: bytes) -> ScramCredential:
    """Return the credential for a password that a client has salted."""
    name = HASHES[mechanism]
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidArgumentError(f"SCRAM needs {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations, got {iterations}")
    if not 1 <= len(salt) <= SALT_BYTES_MAX:
        raise InvalidArgumentError(f"a SCRAM salt must have 1 to {SALT_BYTES_MAX} bytes, got {len(salt)}")
    if len(salted_password) != hashlib.new(name).digest_size:
        raise InvalidArgumentError(f"a salted password of {mechanism} must have {hashlib.new(name).digest_size} bytes")
    client_key = hmac.digest(salted_password, b"Client Key", name)
    server_key = hmac.digest(salted_password, b"Server Key", name)
    return ScramCredential(salt, iterations, hashlib.new(name, client_key).digest(), server_key)


def of_password(mechanism: str, password: str, salt: bytes, iterations: int = ITERATIONS_MIN) -> ScramCredential:
    """Return the credential for a password. Takes a few milliseconds."""
    salted = hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)
    return of_salted(mechanism, salt, iterations, salted)
