"""The exchange type x-consistent-hash: distributes messages over bindings in proportion to their weights.

The routing key of a binding is its weight. The exchange hashes the routing key of a message, or the header or property
that its arguments name. Messages with equal values go to the same binding.

Rendezvous hashing selects the binding: each one has a score from the hash of the value and of its own name, and the
highest score wins. A new binding takes values from the others in proportion to its weight. The values of a removed one
are spread over the others. The selection depends on names and weights only, so it is the same after a restart.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from basaltmq.broker.message.properties import Properties
from basaltmq.errors import PreconditionFailedError

if TYPE_CHECKING:
    from basaltmq.broker.routing.exchange import Arguments, Binding, Destination, Identity

WEIGHT_MAX: Final = 1_000_000
"""Maximum weight of a binding. Useful ratios of weights are far below it."""

HEADER: Final = "hash-header"
PROPERTY: Final = "hash-property"
HASHED_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")
_BITS: Final = 52
"""Bits of a hash. With more, the largest hashes round to a share of 1, whose logarithm is 0."""


def weight_of(routing_key: str) -> int:
    """Return the weight in the routing key of a binding."""
    if not (routing_key.isascii() and routing_key.isdigit()):
        raise PreconditionFailedError(f"the binding key must be an integer weight, not '{routing_key:.80}'")
    weight = int(routing_key)
    if not 1 <= weight <= WEIGHT_MAX:
        raise PreconditionFailedError(f"the binding key must be a weight from 1 to {WEIGHT_MAX}, not {weight}")
    return weight


def check_hash_arguments(arguments: Arguments) -> None:
    """Raise PreconditionFailedError if the hash arguments of an exchange are invalid or contradict each other."""
    if HEADER in arguments and PROPERTY in arguments:
        raise PreconditionFailedError(f"{HEADER} and {PROPERTY} are mutually exclusive")
    if PROPERTY in arguments and arguments[PROPERTY] not in HASHED_PROPERTIES:
        raise PreconditionFailedError(
            f"unsupported {PROPERTY} {arguments[PROPERTY]!r:.80}; use one of {', '.join(HASHED_PROPERTIES)}"
        )
    if HEADER in arguments and not isinstance(arguments[HEADER], str):
        raise PreconditionFailedError(f"{HEADER} must be the name of a header, not {arguments[HEADER]!r:.80}")


class ConsistentHashTable:
    """The bindings of an exchange with their weights."""

    def __init__(self, arguments: Arguments) -> None:
        self._header = arguments.get(HEADER)
        self._property = arguments.get(PROPERTY)
        self.reads_properties = self._header is not None or self._property is not None
        self._weights: dict[Identity, tuple[Destination, bytes, int]] = {}

    def add(self, binding: Binding) -> None:
        name = repr(binding.identity).encode(errors="backslashreplace")
        key = hashlib.blake2b(name, digest_size=32).digest()
        self._weights[binding.identity] = (binding.destination, key, weight_of(binding.routing_key))

    def remove(self, binding: Binding) -> None:
        del self._weights[binding.identity]

    def match(self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None) -> set[Destination]:
        if not self._weights:
            return set()
        value = self._value(next(iter(keys), ""), headers, properties)
        return {max(self._weights.values(), key=lambda each: _score(value, each[1], each[2]))[0]}

    def _value(self, key: str, headers: Arguments, properties: Properties | None) -> bytes:
        """Return the value to hash. Messages without the header or property have the same value."""
        value: Any = key
        if self._header is not None:
            value = headers.get(self._header)
        elif self._property is not None:
            value = None if properties is None else getattr(properties, self._property)
        if isinstance(value, bytes):
            return value
        return b"" if value is None else str(value).encode(errors="surrogateescape")


def _score(value: bytes, key: bytes, weight: int) -> float:
    """Return the score of a binding: its share of the values is proportional to its weight."""
    drawn = int.from_bytes(hashlib.blake2b(value, key=key, digest_size=8).digest(), "big") >> 64 - _BITS
    return -weight / math.log((drawn + 0.5) / (1 << _BITS))
