"""An exchange: its type decides which of its bindings a message takes.

    direct    the routing key is the binding's key
    fanout    every binding
    topic     the routing key matches the binding's pattern (topic_trie.py)
    headers   the message's headers match the binding's arguments: all of them, or any; names that begin with x- count
              only for all-with-x and any-with-x

Each type is a table of bindings with three methods. Tables know destinations and nothing of queues; walking from
exchange to exchange, and what has no route, is topology.py's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from basaltmq.broker.routing.topic_trie import TopicTrie
from basaltmq.errors import PreconditionFailedError

QUEUE: Final = b"q"
EXCHANGE: Final = b"e"

Arguments: TypeAlias = Mapping[str, Any]


class Destination(NamedTuple):
    """Where a binding leads: a queue or an exchange."""

    kind: bytes
    name: str


Identity: TypeAlias = tuple[str, Destination, str, int]


class Binding(NamedTuple):
    """A way from an exchange. Two bindings of one identity are one."""

    source: str
    destination: Destination
    routing_key: str
    arguments: Arguments
    number: int
    """A hash of the arguments: what tells bindings of one key apart."""
    durable: bool
    """Both ends survive a restart, so the binding does."""

    @property
    def identity(self) -> Identity:
        return self.source, self.destination, self.routing_key, self.number


class ExchangeType(enum.StrEnum):
    DIRECT = "direct"
    FANOUT = "fanout"
    TOPIC = "topic"
    HEADERS = "headers"


class Table(Protocol):
    """The bindings of one exchange, as its type looks at them."""

    def add(self, binding: Binding) -> None: ...

    def remove(self, binding: Binding) -> None: ...

    def match(self, keys: Iterable[str], headers: Arguments) -> set[Destination]: ...


class _Counted:
    """Destinations with the number of bindings that lead to each."""

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
    def __init__(self) -> None:
        self._by_key: dict[str, _Counted] = {}

    def add(self, binding: Binding) -> None:
        self._by_key.setdefault(binding.routing_key, _Counted()).add(binding.destination)

    def remove(self, binding: Binding) -> None:
        counted = self._by_key[binding.routing_key]
        counted.remove(binding.destination)
        if not counted.counts:
            del self._by_key[binding.routing_key]

    def match(self, keys: Iterable[str], headers: Arguments) -> set[Destination]:
        found: set[Destination] = set()
        for key in keys:
            counted = self._by_key.get(key)
            if counted is not None:
                found.update(counted.counts)
        return found


class FanoutTable:
    def __init__(self) -> None:
        self._all = _Counted()

    def add(self, binding: Binding) -> None:
        self._all.add(binding.destination)

    def remove(self, binding: Binding) -> None:
        self._all.remove(binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments) -> set[Destination]:
        return set(self._all.counts)


class TopicTable:
    def __init__(self) -> None:
        self._trie: TopicTrie[Destination] = TopicTrie()

    def add(self, binding: Binding) -> None:
        self._trie.add(binding.routing_key, binding.destination)

    def remove(self, binding: Binding) -> None:
        self._trie.remove(binding.routing_key, binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments) -> set[Destination]:
        found: set[Destination] = set()
        for key in keys:
            found |= self._trie.match(key)
        return found


MATCH_MODES: Final = ("all", "any", "all-with-x", "any-with-x")


class _Wanted(NamedTuple):
    """What a binding asks of headers."""

    fields: tuple[tuple[str, Any], ...]
    is_any: bool

    def is_met(self, headers: Arguments) -> bool:
        met = (name in headers and (value is None or _equal(headers[name], value)) for name, value in self.fields)
        return any(met) if self.is_any else all(met)


def _equal(left: object, right: object) -> bool:
    """Numbers equal numbers of any width; True is not 1, and text is not a number."""
    if isinstance(left, bool) is not isinstance(right, bool):
        return False
    return left == right


def wanted_headers(arguments: Arguments) -> _Wanted:
    """What the arguments of a binding to a headers exchange ask for; PreconditionFailedError if x-match is no mode."""
    mode = arguments.get("x-match", "all")
    if mode not in MATCH_MODES:
        raise PreconditionFailedError(f"Invalid x-match field value {mode!r:.80}; expected {', '.join(MATCH_MODES)}")
    with_x = mode.endswith("-with-x")
    fields = [
        (name, value)
        for name, value in arguments.items()
        if name != "x-match" and (with_x or not name.startswith("x-"))
    ]
    return _Wanted(tuple(fields), mode.startswith("any"))


Place: TypeAlias = tuple[str, bool, object] | str
"""Where a header is looked up: name, whether the value is a bool (True is not 1), value; or the name alone."""


def _place(name: str, value: object) -> Place:
    try:
        hash(value)
    except TypeError:
        # A table or an array.
        return name
    return name if value is None else (name, isinstance(value, bool), value)


class HeadersTable:
    """Bindings by the headers they ask for, so that a message is compared only with those that may take it.

    A binding that asks for any of its headers is found by each of them. One that asks for all is found by one of them:
    the one that the fewest other bindings are found by.
    """

    def __init__(self) -> None:
        self._places: dict[Identity, tuple[Place, ...]] = {}
        self._found_at: dict[Place, dict[Identity, tuple[_Wanted, Destination]]] = {}
        self._always = _Counted()
        """Destinations of bindings that ask for all of no headers."""

    def add(self, binding: Binding) -> None:
        wanted = wanted_headers(binding.arguments)
        places = {_place(name, value) for name, value in wanted.fields}
        if not wanted.is_any:
            if not places:
                self._always.add(binding.destination)
            places = set(sorted(places, key=lambda place: len(self._found_at.get(place, ())))[:1])
        self._places[binding.identity] = tuple(places)
        for place in places:
            self._found_at.setdefault(place, {})[binding.identity] = (wanted, binding.destination)

    def remove(self, binding: Binding) -> None:
        places = self._places.pop(binding.identity)
        for place in places:
            found = self._found_at[place]
            del found[binding.identity]
            if not found:
                del self._found_at[place]
        if not places and not wanted_headers(binding.arguments).is_any:
            self._always.remove(binding.destination)

    def match(self, keys: Iterable[str], headers: Arguments) -> set[Destination]:
        reached = set(self._always.counts)
        for name, value in headers.items():
            for place in {name, _place(name, value)}:
                for wanted, destination in self._found_at.get(place, _NOTHING).values():
                    if destination not in reached and wanted.is_met(headers):
                        reached.add(destination)
        return reached


_NOTHING: Final[Mapping[Identity, tuple[_Wanted, Destination]]] = {}


_TABLES: Final[Mapping[ExchangeType, type[Table]]] = {
    ExchangeType.DIRECT: DirectTable,
    ExchangeType.FANOUT: FanoutTable,
    ExchangeType.TOPIC: TopicTable,
    ExchangeType.HEADERS: HeadersTable,
}


class Exchange:
    """One exchange with the bindings that begin at it."""

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
        """Where messages go that no binding takes: by argument, else by policy."""
        self.policy: str | None = None
        """The name of the policy in force."""
        self.bindings: dict[Identity, Binding] = {}
        self.published = 0
        self.table: Table = _TABLES[kind]()

    def add(self, binding: Binding) -> None:
        self.table.add(binding)
        self.bindings[binding.identity] = binding

    def remove(self, binding: Binding) -> None:
        del self.bindings[binding.identity]
        self.table.remove(binding)
