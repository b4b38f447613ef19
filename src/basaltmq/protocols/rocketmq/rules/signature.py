"""The authorization of a call: `MQv2-HMAC-SHA1 Credential=KEY, SignedHeaders=x-mq-date-time, Signature=HEX`.

The signature is the HMAC-SHA1 of the header x-mq-date-time under the secret of the access key. Clients label their
local time as UTC, so the time cannot be checked for freshness.
"""

from __future__ import annotations

import hmac
from typing import Final, NamedTuple

from basaltmq.errors import AuthenticationError

ALGORITHM: Final = "MQv2-HMAC-SHA1"


class Signed(NamedTuple):
    """The parts of an authorization."""

    access_key: str
    signature: str


def parse_authorization(text: str) -> Signed | None:
    """Return the parts of an authorization, or None if it has no access key. Clients without credentials send such a
    header."""
    algorithm, _, rest = text.strip().partition(" ")
    if algorithm != ALGORITHM:
        raise AuthenticationError(f"the authorization of a call must begin with {ALGORITHM}")
    parts = dict(part.strip().partition("=")[::2] for part in rest.split(","))
    access_key = parts.get("Credential", "").partition("/")[0]
    if not access_key:
        return None
    return Signed(access_key, parts.get("Signature", ""))


def signature_of(secret: str, date_time: str) -> str:
    return hmac.new(secret.encode(), date_time.encode(), "sha1").hexdigest()


def is_signed(signed: Signed, secret: str, date_time: str) -> bool:
    """Whether the signature was made with this secret. Clients write hex in either case."""
    expected = signature_of(secret, date_time)
    return hmac.compare_digest(expected.encode(), signed.signature.lower().encode(errors="replace"))
