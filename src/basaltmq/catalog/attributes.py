"""Attributes: a user's JSON object, stored as bytes.

A value that does not survive the round trip is an error. Otherwise the encoder would turn NaN into null, bytes into
base64 and a tuple into a list. The bytes are therefore decoded again and compared, which also yields a copy that the
caller cannot modify. Integers of any size survive. Text must be valid Unicode.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError, LimitExceededError

Attributes: TypeAlias = dict[str, Any]

ATTRIBUTES_BYTES_MAX: Final = 1 << 20
"""Size limit of one object's JSON. A script or a policy fits, and a thousand of them still fit into a batch."""

NESTING_MAX: Final = 64
"""Far below the depth at which a decoder exhausts the call stack."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = json_decoder(dict[str, Any])


def encode_attributes(attributes: object, kind: str, object_id: UUID) -> bytes:
    """Encode attributes as JSON. Kind and id identify the owner in errors."""
    if not isinstance(attributes, dict):
        raise InvalidArgumentError(
            f"the attributes of {kind} {object_id} must be a dict, not {type(attributes).__name__}"
        )
    try:
        raw = _encode(attributes)
        same = _decode(raw) == attributes
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        same, raw = False, b""
    if not same:
        raise InvalidArgumentError(
            f"attribute {_first_unsupported(attributes)} of {kind} {object_id} cannot be stored as JSON: use None, "
            f"bool, int, finite float, str, list and dict with str keys, at most {NESTING_MAX} deep"
        )
    if len(raw) > ATTRIBUTES_BYTES_MAX:
        raise LimitExceededError(
            f"the attributes of {kind} {object_id} take {len(raw)} bytes as JSON; the limit is {ATTRIBUTES_BYTES_MAX}"
        )
    # The number of brackets is an upper bound of the depth. Only documents with many brackets are traversed.
    if raw.count(b"{") + raw.count(b"[") > NESTING_MAX and not _is_shallow(attributes):
        raise LimitExceededError(f"the attributes of {kind} {object_id} are nested deeper than {NESTING_MAX}")
    return raw


def _is_shallow(attributes: Attributes) -> bool:
    level: list[Any] = [attributes]
    for _ in range(NESTING_MAX):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


def _first_unsupported(attributes: dict[object, object]) -> str:
    """Return the path of the first attribute that does not survive the round trip."""
    for name, value in attributes.items():
        try:
            if _decode(_encode({name: value})) == {name: value}:
                continue
        except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
            pass
        return ascii(name)[:80]
    return "nesting"
