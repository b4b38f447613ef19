"""Exchanges: select the bindings that match a message, according to the exchange type.

    direct    the routing key equals the binding's key
    fanout    every binding matches
    topic     the routing key matches the binding's pattern (topic_trie.py)
    headers   the message's headers match all or any of the binding's arguments; names that begin with x- count only in
              the modes all-with-x and any-with-x
    x-consistent-hash   one binding per message, by the hash of its routing key (consistent_hash.py)
    x-delayed-message   as the type in x-delayed-type, after the time in the message's header x-delay

Each type is a table of bindings, which maps a message to destinations. `Topology.route` follows bindings between
exchanges and handles messages without a route.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from basaltmq.broker.message.properties import Properties
from basaltmq.broker.routing.consistent_hash import ConsistentHashTable, check_hash_arguments, weight_of
from basaltmq.broker.routing.topic_trie import TopicTrie
from basaltmq.errors import PreconditionFailedError

QUEUE: Final = b"q"
EXCHANGE: Final = b"e"

Arguments: TypeAlias = Mapping[str, Any]


class Destination(NamedTuple):
    """The target of a binding: a queue or an exchange."""

    kind: bytes
    name: str


Identity: TypeAlias = tuple[str, Destination, str, int]


class Binding(NamedTuple):
    """A rule that routes messages of an exchange to a destination. Unique by `identity`."""

    source: str
    destination: Destination
    routing_key: str
    arguments: Arguments
    number: int
    """Hash of the arguments. It distinguishes bindings with the same key."""
    durable: bool
    """Whether the binding survives a restart, because its source and its destination do."""

    @property
    def identity(self) -> Identity:
        return self.source, self.destination, self.routing_key, self.number


class ExchangeType(enum.StrEnum):
    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"
    CONSISTENT_HASH = "x-consistent-hash"
    DELAYED = "x-delayed-message"


DELAYED_TYPE: Final = "x-delayed-type"
"""Argument of a delayed exchange: the type by which it selects bindings."""


class Table(Protocol):
    """The bindings of one exchange, indexed for its type."""

    reads_properties: bool
    """Whether the selection depends on more than the routing key."""

    def add(self, binding: Binding) -> None: ...

    def remove(self, binding: Binding) -> None: ...

    def match(
        self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None
    ) -> set[Destination]: ...


class _Counted:
    """Destinations with the number of bindings to each."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[Destination, int] = {}

    def add(self, destination: Destination) -> None:
        self.counts[destination] = self.counts.get(destination, 0) + 1

    def remove(self, destination: Destination) -> None:
        self.counts[destination] -= 1
        if not self.counts[destination]:
            del self.counts[destination]


class DirectTable:
    reads_properties = False

    def __init__(self) -> None:
        self._by_key: dict[str, _Counted] = {}

    def add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, _Counted()).add(binding.destination)

    def remove(self, binding: Binding) -> None:
        counted = self._by_key[binding.routing_key]
        counted.remove(binding.destination)
        if not counted.counts:
            del self._by_key[binding.routing_key]

    def match(self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None) -> set[Destination]:
        found: set[Destination] = set()
        for key in keys:
            counted = self._by_key.get(key)
            if counted is not None:
                found.update(counted.counts)
        return found


class FanoutTable:
    reads_properties = False

    def __init__(self) -> None:
        self._all = _Counted()

    def add(self, binding: Binding) -> None:
        self._all.add(binding.destination)

    def remove(self, binding: Binding) -> None:
        self._all.remove(binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None) -> set[Destination]:
        return set(self._all.counts)


class TopicTable:
    reads_properties = False

    def __init__(self) -> None:
        self._trie: TopicTrie[Destination] = TopicTrie()

    def add(self, binding: Binding) -> None:
        self._trie.add(binding.routing_key, binding.destination)

    def remove(self, binding: Binding) -> None:
        self._trie.remove(binding.routing_key, binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None) -> set[Destination]:
        found: set[Destination] = set()
        for key in keys:
            found |= self._trie.match(key)
        return found


MATCH_MODES: Final = ("all", "any", "all-with-x", "any-with-x")


class _Condition(NamedTuple):
    """The header condition of a binding."""

    fields: tuple[tuple[str, Any], ...]
    is_any: bool

    def is_met(self, headers: Arguments) -> bool:
        met = (name in headers and (value is None or _equal(headers[name], value)) for name, value in self.fields)
        return any(met) if self.is_any else all(met)


def _equal(left: object, right: object) -> bool:
    """Whether two values are equal. True does not equal 1, and text does not equal a number."""
    if isinstance(left, bool) is not isinstance(right, bool):
        return False
    return left == right


def header_condition(arguments: Arguments) -> _Condition:
    """Return the header condition in a binding's arguments. Raises PreconditionFailedError for an invalid x-match."""
    mode = arguments.get("x-match", "all")
    if mode not in MATCH_MODES:
        raise PreconditionFailedError(f"Invalid x-match field value {mode!r:.80}; expected {', '.join(MATCH_MODES)}")
    with_x = mode.endswith("-with-x")
    fields = [
        (name, value)
        for name, value in arguments.items()
        if name != "x-match" and (with_x or not name.startswith("x-"))
    ]
    return _Condition(tuple(fields), mode.startswith("any"))


IndexKey: TypeAlias = tuple[str, bool, object] | str
"""Index key of a header: (name, whether the value is a bool, value), or the name alone. True must not equal 1."""


def _index_key(name: str, value: object) -> IndexKey:
    try:
        hash(value)
    except TypeError:
        # Tables and arrays are not hashable.
        return name
    return name if value is None else (name, isinstance(value, bool), value)


class HeadersTable:
    """Bindings indexed by header, so that a message is compared only with candidates.

    A binding in an `any` mode is indexed under each of its headers. In an `all` mode it is indexed under one of them:
    the one with the fewest other bindings.
    """

    reads_properties = True

    def __init__(self) -> None:
        self._index_keys: dict[Identity, tuple[IndexKey, ...]] = {}
        self._by_index_key: dict[IndexKey, dict[Identity, tuple[_Condition, Destination]]] = {}
        self._always = _Counted()
        """Destinations of `all` bindings without headers, which match every message."""

    def add(self, binding: Binding) -> None:
        condition = header_condition(binding.arguments)
        index_keys = {_index_key(name, value) for name, value in condition.fields}
        if not condition.is_any:
            if not index_keys:
                self._always.add(binding.destination)
            index_keys = set(sorted(index_keys, key=lambda index_key: len(self._by_index_key.get(index_key, ())))[:1])
        self._index_keys[binding.identity] = tuple(index_keys)
        for index_key in index_keys:
            self._by_index_key.setdefault(index_key, {})[binding.identity] = (condition, binding.destination)

    def remove(self, binding: Binding) -> None:
        index_keys = self._index_keys.pop(binding.identity)
        for index_key in index_keys:
            found = self._by_index_key[index_key]
            del found[binding.identity]
            if not found:
                del self._by_index_key[index_key]
        if not index_keys and not header_condition(binding.arguments).is_any:
            self._always.remove(binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments, properties: Properties | None = None) -> set[Destination]:
        reached = set(self._always.counts)
        for name, value in headers.items():
            for index_key in {name, _index_key(name, value)}:
                for condition, destination in self._by_index_key.get(index_key, _NO_BINDINGS).values():
                    if destination not in reached and condition.is_met(headers):
                        reached.add(destination)
        return reached


_NO_BINDINGS: Final[Mapping[Identity, tuple[_Condition, Destination]]] = {}


_TABLES: Final[Mapping[ExchangeType, Callable[[], Table]]] = {
    ExchangeType.DIRECT: DirectTable,
    ExchangeType.FANOUT: FanoutTable,
    ExchangeType.TOPIC: TopicTable,
    ExchangeType.HEADERS: HeadersTable,
}


def _table(kind: ExchangeType, arguments: Arguments) -> Table:
    if kind is ExchangeType.DELAYED:
        kind = delayed_type(arguments)
    return ConsistentHashTable(arguments) if kind is ExchangeType.CONSISTENT_HASH else _TABLES[kind]()


def delayed_type(arguments: Arguments) -> ExchangeType:
    """Return the type by which a delayed exchange selects bindings."""
    asked = arguments.get(DELAYED_TYPE)
    try:
        kind = ExchangeType(str(asked))
    except ValueError:
        kind = ExchangeType.DELAYED
    if kind is ExchangeType.DELAYED:
        known = ", ".join(each for each in ExchangeType if each is not ExchangeType.DELAYED)
        raise PreconditionFailedError(f"invalid argument {DELAYED_TYPE} {asked!r:.80}; use one of {known}")
    return kind


def check_type_arguments(kind: ExchangeType, arguments: Arguments) -> None:
    """Raise PreconditionFailedError for invalid arguments of an exchange type."""
    if kind is ExchangeType.DELAYED:
        kind = delayed_type(arguments)
    if kind is ExchangeType.CONSISTENT_HASH:
        check_hash_arguments(arguments)


def check_binding(exchange: Exchange, routing_key: str, arguments: Arguments) -> None:
    """Raise PreconditionFailedError for a binding that the type of its exchange does not understand."""
    if isinstance(exchange.table, HeadersTable):
        header_condition(arguments)
    elif isinstance(exchange.table, ConsistentHashTable):
        weight_of(routing_key)


class Exchange:
    """An exchange with its outgoing bindings."""

    __slots__ = (
        "alternate",
        "arguments",
        "auto_delete",
        "bindings",
        "durable",
        "internal",
        "name",
        "policy",
        "published",
        "table",
        "type",
    )

    def __init__(
        self,
        name: str,
        kind: ExchangeType,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Arguments | None = None,
    ) -> None:
        self.name = name
        self.type = kind
        self.durable = durable
        self.auto_delete = auto_delete
        self.internal = internal
        self.arguments: Arguments = dict(arguments or {})
        self.alternate: str | None = self.arguments.get("alternate-exchange")
        """The exchange for messages that match no binding: from the argument, otherwise from the policy."""
        self.policy: str | None = None
        """Name of the policy that applies."""
        self.bindings: dict[Identity, Binding] = {}
        self.published = 0
        self.table = _table(kind, self.arguments)

    def add(self, binding: Binding, identity: Identity) -> None:
        """Add a binding. `identity` is its own; the caller keeps the same object."""
        self.table.add(binding)
        self.bindings[identity] = binding

    def remove(self, binding: Binding) -> None:
        del self.bindings[binding.identity]
        self.table.remove(binding)
