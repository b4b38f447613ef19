"""Attributes: a JSON object a user hands in, kept as bytes.

What comes back is what went in, or the call fails: the encoder would turn NaN into null, bytes into base64, a tuple
into a list. So the bytes are decoded again and compared, which also gives a copy the caller cannot change behind our
back. Integers of any size survive; text must be valid Unicode.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec

from basaltmq.decoding import json_decoder
from basaltmq.errors import InvalidArgumentError, LimitExceededError

Attributes: TypeAlias = dict[str, Any]

ATTRIBUTES_BYTES_MAX: Final = 1 << 20
"""Of one object, as JSON: a script or a policy fits; a thousand of them still fit a batch."""

NESTING_MAX: Final = 64
"""Far below the depth at which a decoder in a deep call stack runs out of it."""

_encode: Final = msgspec.json.Encoder().encode
_decode: Final = json_decoder(dict[str, Any])


def encode_attributes(attributes: object, kind: str, object_id: UUID) -> bytes:
    """The attributes as JSON. Kind and id name their owner in errors."""
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
            f"attribute {_culprit(attributes)} of {kind} {object_id} cannot be kept as JSON: use None, bool, int, "
            f"finite float, str, list and dict with str keys, at most {NESTING_MAX} deep"
        )
    if len(raw) > ATTRIBUTES_BYTES_MAX:
        raise LimitExceededError(
            f"the attributes of {kind} {object_id} take {len(raw)} bytes as JSON; the limit is {ATTRIBUTES_BYTES_MAX}"
        )
    # Brackets bound the depth from above; only documents with many of them are walked.
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


def _culprit(attributes: dict[object, object]) -> str:
    """The first attribute that does not survive."""
    for name, value in attributes.items():
        try:
            if _decode(_encode({name: value})) == {name: value}:
                continue
        except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
            pass
        return ascii(name)[:80]
    return "nesting"
