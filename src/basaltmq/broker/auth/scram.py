"""What is kept of a password for SCRAM (RFC 5802, 7677): enough to check a proof, not to make one.

    salted password   PBKDF2 of the password with a salt and a number of iterations; made by the client
    stored key        H(HMAC(salted password, "Client Key"))
    server key        HMAC(salted password, "Server Key")

The hashes other logins use (`passwords`) cannot serve SCRAM, and PBKDF2 with some thousand rounds is cheaper to guess
against than they are. So nothing is derived when a password is set: only users an administrator gave a SCRAM credential
have one, and it goes when their password is changed.
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
"""The least RFC 7677 asks for."""

ITERATIONS_MAX: Final = 16_384
"""As Apache Kafka: the client does them at each login."""

SALT_BYTES_MAX: Final = 256


class ScramCredential(NamedTuple):
    """Of one user and one mechanism."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def row(self) -> dict[str, Any]:
        """As the user's attributes hold it."""
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
    """What is kept of a password a client has salted."""
    name = HASHES[mechanism]
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise InvalidArgumentError(f"SCRAM takes {ITERATIONS_MIN} to {ITERATIONS_MAX} iterations, not {iterations}")
    if not 1 <= len(salt) <= SALT_BYTES_MAX:
        raise InvalidArgumentError(f"a salt has 1 to {SALT_BYTES_MAX} bytes, not {len(salt)}")
    if len(salted_password) != hashlib.new(name).digest_size:
        raise InvalidArgumentError(f"a salted password of {mechanism} has {hashlib.new(name).digest_size} bytes")
    client_key = hmac.digest(salted_password, b"Client Key", name)
    server_key = hmac.digest(salted_password, b"Server Key", name)
    return ScramCredential(salt, iterations, hashlib.new(name, client_key).digest(), server_key)
