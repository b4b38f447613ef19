"""SCRAM (RFC 5802), server side: two messages in, two out, no I/O.

    client   n,,n=<name>,r=<nonce>                                    first
    broker   r=<nonce><ours>,s=<salt>,i=<iterations>
    client   c=<GS2 header, base64>,r=<nonce><ours>,p=<proof>         final
    broker   v=<signature>

The password is never sent: the proof shows that the client knows it, and the signature that the broker has the
credential. An unknown user name gets a salt that is always the same, and fails like a wrong password.
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
"""Limit of a client's nonce in characters. Clients use about 30."""


class ScramExchange:
    """One SCRAM authentication."""

    def __init__(
        self, mechanism: str, credential_of: Callable[[str], tuple[ScramCredential, bool]], nonce: str
    ) -> None:
        """`credential_of` returns a credential for any name, and whether the user exists; `nonce` must be unique."""
        self.name = ""
        self._hash = HASHES[mechanism]
        self._credential_of = credential_of
        self._own_nonce = nonce
        self._nonce = ""
        self._signed = b""
        self._gs2_header = b""
        self._credential: ScramCredential | None = None
        self._user_exists = False

    def first(self, raw: bytes) -> bytes:
        """Process the client's first message and return the response."""
        text = _text(raw)
        parts = text.split(",", 2)
        if len(parts) != 3 or parts[0] not in {"n", "y"}:
            raise AuthenticationError("the first SCRAM message must start with 'n,' or 'y,': no channel binding")
        actor, rest = parts[1], parts[2]
        fields = _fields(rest)
        self.name = _unescaped(fields.get("n", ""))
        nonce = fields.get("r", "")
        if "m" in fields or not self.name or not 1 <= len(nonce) <= NONCE_CHARS_MAX:
            raise AuthenticationError(
                "the first SCRAM message must have a user name and a nonce, and no mandatory extension"
            )
        if "tokenauth" in fields:
            raise AuthenticationError("delegation tokens are not supported; authenticate as a user")
        if actor and _unescaped(actor.removeprefix("a=")) != self.name:
            raise AuthenticationError(f"user '{self.name}' may not act for another user")
        self._credential, self._user_exists = self._credential_of(self.name)
        self._nonce = nonce + self._own_nonce
        self._gs2_header = f"{parts[0]},{actor},".encode()
        salt = base64.b64encode(self._credential.salt).decode()
        response = f"r={self._nonce},s={salt},i={self._credential.iterations}"
        self._signed = f"{rest},{response}".encode()
        return response.encode()

    def final(self, raw: bytes) -> bytes:
        """Process the client's final message and return the response; AuthenticationError if it fails."""
        credential = self._credential
        assert credential is not None, "final() before first()"
        text = _text(raw)
        without_proof, _, proof_text = text.rpartition(",p=")
        fields = _fields(without_proof)
        proof = _decoded(proof_text)
        if _decoded(fields.get("c", "")) != self._gs2_header or fields.get("r") != self._nonce:
            raise AuthenticationError("the final SCRAM message does not match the first (channel binding or nonce)")
        signed = self._signed + b"," + without_proof.encode()
        client_signature = hmac.digest(credential.stored_key, signed, self._hash)
        if len(proof) != len(client_signature):
            raise self._refused()
        client_key = bytes(one ^ other for one, other in zip(proof, client_signature, strict=True))
        is_right = hmac.compare_digest(hashlib.new(self._hash, client_key).digest(), credential.stored_key)
        if not (is_right and self._user_exists):
            raise self._refused()
        return b"v=" + base64.b64encode(hmac.digest(credential.server_key, signed, self._hash))

    def _refused(self) -> AuthenticationError:
        return AuthenticationError(f"user '{self.name}' was refused: wrong user name or password")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise AuthenticationError("the SCRAM message is not UTF-8") from None


def _fields(text: str) -> dict[str, str]:
    return {name: value for name, is_there, value in (part.partition("=") for part in text.split(",")) if is_there}


def _unescaped(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise AuthenticationError("the SCRAM message has a field that is not base64") from None
