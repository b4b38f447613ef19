"""Policies: settings for all queues and exchanges whose names match a pattern, with RabbitMQ's semantics (SPEC E).

Of the matching policies, the one with the highest priority applies. The matching operator policy with the highest
priority applies in addition; of two numeric values the smaller one is used. Policies are rows of the virtual host's
store and are cached in memory, because each declaration needs them:

    policy   kind (p or o), name   ->   | layout u8 | MessagePack of the policy |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from difflib import get_close_matches
from typing import Any, Final

import msgspec

from basaltmq.broker.auth.patterns import Pattern, compiled, stored
from basaltmq.broker.routing.arguments import QUEUE_ARGUMENTS, QUORUM, STREAM
from basaltmq.decoding import msgpack_decoder
from basaltmq.errors import CorruptionError, InvalidArgumentError, NotFoundError
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import broker as broker_keys
from basaltmq.store.keys import parts as key_parts

LAYOUT: Final = 1
USERS: Final = b"p"
OPERATORS: Final = b"o"

APPLY_TO: Final = ("all", "exchanges", "queues", "classic_queues", "quorum_queues", "streams")
EXCHANGE_KEYS: Final = frozenset({"alternate-exchange"})
KEPT_KEYS: Final = frozenset(
    [
        "consumer-timeout",
        "dead-letter-strategy",
        "federation-upstream",
        "federation-upstream-set",
        "ha-mode",
        "ha-params",
        "ha-sync-mode",
        "initial-cluster-size",
        "max-in-memory-bytes",
        "max-in-memory-length",
        "queue-leader-locator",
        "queue-mode",
        "queue-version",
        "stream-max-segment-size-bytes",
        "target-group-size",
    ]
)
"""Keys of RabbitMQ that have no effect here. They are stored so that definitions can be imported and exported."""

OPERATOR_KEYS: Final = frozenset(
    {"expires", "message-ttl", "max-length", "max-length-bytes", "delivery-limit", "overflow"}
)


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    pattern: str
    definition: dict[str, Any]
    priority: int = 0
    apply_to: str = "all"

    def check(self, kind: bytes = USERS) -> None:
        """Raise InvalidArgumentError if a field is invalid."""
        compiled(self.pattern, f"the pattern of policy {self.name!r}")
        if self.apply_to not in APPLY_TO:
            raise InvalidArgumentError(f"apply-to of policy {self.name!r} must be one of {', '.join(APPLY_TO)}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise InvalidArgumentError(f"the priority of policy {self.name!r} must be an integer")
        if not self.definition:
            raise InvalidArgumentError(f"the definition of policy {self.name!r} is empty; set at least one key")
        for key, value in self.definition.items():
            self._check_key(key, value, kind)

    def _check_key(self, key: str, value: Any, kind: bytes) -> None:
        if kind == OPERATORS and key not in OPERATOR_KEYS:
            raise InvalidArgumentError(
                f"an operator policy cannot set {key!r}, only {', '.join(sorted(OPERATOR_KEYS))}"
            )
        if key in KEPT_KEYS:
            return
        if key in EXCHANGE_KEYS:
            if not isinstance(value, str):
                raise InvalidArgumentError(f"{key} of policy {self.name!r} must be text")
            return
        known = QUEUE_ARGUMENTS.get(f"x-{key}")
        if known is None:
            known_keys = [*EXCHANGE_KEYS, *(each.removeprefix("x-") for each in QUEUE_ARGUMENTS)]
            close = get_close_matches(key, known_keys, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise InvalidArgumentError(f"policy {self.name!r} sets the unknown key {key!r}{hint}")
        try:
            known.check(value)
        except ValueError as error:
            raise InvalidArgumentError(f"{key} of policy {self.name!r}: {error}") from None


class EffectivePolicy(msgspec.Struct, frozen=True):
    """The merged definition of the policies that apply to one queue or exchange."""

    name: str | None
    definition: Mapping[str, Any]


_NONE: Final = EffectivePolicy(None, {})
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgpack_decoder(Policy)


class Policies:
    """The policies of one virtual host."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[bytes, dict[str, Policy]] = {USERS: {}, OPERATORS: {}}
        self._sorted: dict[bytes, list[tuple[Pattern, Policy]]] = {USERS: [], OPERATORS: []}
        self.changed: Callable[[], None] = lambda: None
        """Called after each change."""

    def load(self) -> None:
        for kind in (USERS, OPERATORS):
            for key, row in self._store.scan(Family.TOPOLOGY, *key_parts.prefix_range(broker_keys.policy_prefix(kind))):
                _, name = broker_keys.decode_policy_key(key)
                try:
                    if row[:1] != bytes((LAYOUT,)):
                        raise ValueError("unknown layout")
                    self._known[kind][name] = _DECODE(row[1:])
                except (ValueError, msgspec.MsgspecError) as error:
                    raise CorruptionError(f"the row of policy {name!r} is damaged: {error}") from None
            self._sort(kind)

    def set(self, policy: Policy, *, operators: bool = False) -> None:
        """Create or replace a policy."""
        kind = OPERATORS if operators else USERS
        policy.check(kind)
        batch = Batch()
        batch.put(Family.TOPOLOGY, broker_keys.policy_key(kind, policy.name), bytes((LAYOUT,)) + _ENCODE(policy))
        self._store.write(batch)
        self._known[kind][policy.name] = policy
        self._sort(kind)
        self.changed()

    def delete(self, name: str, *, operators: bool = False) -> None:
        kind = OPERATORS if operators else USERS
        if name not in self._known[kind]:
            raise NotFoundError(f"policy {name!r} not found")
        batch = Batch()
        batch.delete(Family.TOPOLOGY, broker_keys.policy_key(kind, name))
        self._store.write(batch)
        del self._known[kind][name]
        self._sort(kind)
        self.changed()

    def list(self, *, operators: bool = False) -> list[Policy]:
        return sorted(self._known[OPERATORS if operators else USERS].values(), key=lambda each: each.name)

    def count(self) -> int:
        """Return the number of policies of both kinds."""
        return sum(map(len, self._known.values()))

    def of_queue(self, name: str, kind: str) -> EffectivePolicy:
        wanted = {"all", "queues", {QUORUM: "quorum_queues", STREAM: "streams"}.get(kind, "classic_queues")}
        return self._of(name, wanted)

    def of_exchange(self, name: str) -> EffectivePolicy:
        return self._of(name, {"all", "exchanges"})

    def _of(self, name: str, wanted: Set[str]) -> EffectivePolicy:
        users = self._first(USERS, name, wanted)
        operators = self._first(OPERATORS, name, wanted)
        if operators is None:
            return _NONE if users is None else EffectivePolicy(users.name, users.definition)
        definition = dict(users.definition) if users is not None else {}
        for key, value in operators.definition.items():
            has = definition.get(key)
            definition[key] = min(has, value) if isinstance(has, int) and isinstance(value, int) else value
        return EffectivePolicy(None if users is None else users.name, definition)

    def _first(self, kind: bytes, name: str, wanted: Set[str]) -> Policy | None:
        for pattern, policy in self._sorted[kind]:
            if policy.apply_to in wanted and pattern.is_in(name):
                return policy
        return None

    def _sort(self, kind: bytes) -> None:
        known = sorted(self._known[kind].values(), key=lambda each: (-each.priority, each.name))
        self._sorted[kind] = [
            (stored(policy.pattern, f"the pattern of policy {policy.name!r}"), policy) for policy in known
        ]
