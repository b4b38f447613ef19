"""SCRAM, the broker's side of it: two messages in, two out, no I/O (RFC 5802).

    client   n,,n=<name>,r=<nonce>                                    first
    broker   r=<nonce><ours>,s=<salt>,i=<iterations>
    client   c=<what stood before n=, base64>,r=<nonce><ours>,p=<proof>      final
    broker   v=<signature>

Neither side learns the password of the other: the proof shows that the client knows it, the signature that the broker
has the credential. A name nobody has gets a salt of its own, always the same, and fails like a wrong password.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from typing import Final

from basaltmq.broker.auth.scram import HASHES, ScramCredential
from basaltmq.errors import AuthenticationError

NONCE_CHARS_MAX: Final = 1024
"""Of a client's nonce; theirs have some thirty."""


class ScramExchange:
    """One client that says who it is."""

    def __init__(
        self, mechanism: str, credential_of: Callable[[str], tuple[ScramCredential, bool]], nonce: str
    ) -> None:
        """`credential_of` gives a credential for any name, and whether it is somebody's; `nonce` is used once."""
        self.name = ""
        self._hash = HASHES[mechanism]
        self._credential_of = credential_of
        self._own_nonce = nonce
        self._nonce = ""
        self._signed = b""
        self._front = b""
        self._credential: ScramCredential | None = None
        self._is_somebody = False

    @property
    def is_begun(self) -> bool:
        return self._credential is not None

    def first(self, raw: bytes) -> bytes:
        """The answer to the first message."""
        text = _text(raw)
        parts = text.split(",", 2)
        if len(parts) != 3 or parts[0] not in {"n", "y"}:
            raise AuthenticationError("SCRAM without channel binding begins with n or y and two commas")
        actor, rest = parts[1], parts[2]
        fields = _fields(rest)
        self.name = _unescaped(fields.get("n", ""))
        nonce = fields.get("r", "")
        if "m" in fields or not self.name or not 1 <= len(nonce) <= NONCE_CHARS_MAX:
            raise AuthenticationError(
                "the first message of SCRAM has a name and a nonce, and no extension we must know"
            )
        if "tokenauth" in fields:
            raise AuthenticationError("delegation tokens are not served here; log in as a user")
        if actor and _unescaped(actor.removeprefix("a=")) != self.name:
            raise AuthenticationError(f"user '{self.name}' may not act for another")
        self._credential, self._is_somebody = self._credential_of(self.name)
        self._nonce = nonce + self._own_nonce
        self._front = f"{parts[0]},{actor},".encode()
        salt = base64.b64encode(self._credential.salt).decode()
        answer = f"r={self._nonce},s={salt},i={self._credential.iterations}"
        self._signed = f"{rest},{answer}".encode()
        return answer.encode()

    def final(self, raw: bytes) -> bytes:
        """The answer to the last message; AuthenticationError unless the client knows the password."""
        credential = self._credential
        assert credential is not None, "the first message comes first"
        text = _text(raw)
        without_proof, _, proof_text = text.rpartition(",p=")
        fields = _fields(without_proof)
        proof = _decoded(proof_text)
        if _decoded(fields.get("c", "")) != self._front or fields.get("r") != self._nonce:
            raise AuthenticationError("the last message of SCRAM does not belong to the first")
        signed = self._signed + b"," + without_proof.encode()
        client_signature = hmac.digest(credential.stored_key, signed, self._hash)
        if len(proof) != len(client_signature):
            raise self._refused()
        client_key = bytes(one ^ other for one, other in zip(proof, client_signature, strict=True))
        is_right = hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), credential.stored_key)
        if not (is_right and self._is_somebody):
            raise self._refused()
        return b"v=" + base64.b64encode(hmac.digest(credential.server_key, signed, self._hash))

    def _refused(self) -> AuthenticationError:
        return AuthenticationError(f"user '{self.name}' was refused: the name or the password is wrong")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise AuthenticationError("a message of SCRAM is not UTF-8") from None


def _fields(text: str) -> dict[str, str]:
    return {name: value for name, is_there, value in (part.partition("=") for part in text.split(",")) if is_there}


def _unescaped(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise AuthenticationError("a message of SCRAM has a field that is not base64") from None
