"""Exchanges and bindings of a virtual host, and routing through them.

All of them are in memory. Durable ones are also rows, which are written with each change and read at open:

    exchange   name                                             ->  | layout u8 | flags u8 | lp(type) | arguments |
    binding    source, kind, destination, key, arguments' hash  ->  | layout u8 | arguments |

Arguments are an AMQP field table. A binding is durable if its source and its destination are. Opening removes binding
rows whose source or destination is missing; a crash during an unconfirmed deletion leaves such rows.

Memory and rows agree after every operation. A removal first collects everything that it affects, then deletes it from
disk in one batch, then from memory. `tests/model/test_topology.py` compares both with a plain model.

Routing visits each exchange once, so cycles of bindings or alternate exchanges terminate. If no binding of an exchange
matches, the message goes to its alternate exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from basaltmq.broker.message import amqp_table
from basaltmq.broker.message.properties import Properties
from basaltmq.broker.routing.arguments import Owner, check_exchange_arguments, check_same
from basaltmq.broker.routing.consistent_hash import HEADER, PROPERTY
from basaltmq.broker.routing.exchange import (
    DELAYED_TYPE,
    EXCHANGE,
    QUEUE,
    Arguments,
    Binding,
    Destination,
    Exchange,
    ExchangeType,
    check_binding,
    check_type_arguments,
)
from basaltmq.errors import (
    AccessRefusedError,
    CorruptionError,
    ExchangeNotFoundError,
    InvalidArgumentError,
    MalformedTableError,
    NotFoundError,
    PreconditionFailedError,
    UnknownExchangeTypeError,
)
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family
from basaltmq.store.keys import broker as broker_keys
from basaltmq.store.keys import parts as key_parts

LAYOUT: Final = 1

PREDECLARED: Final = (
    ("amq.direct", ExchangeType.DIRECT),
    ("amq.fanout", ExchangeType.FANOUT),
    ("amq.topic", ExchangeType.TOPIC),
    ("amq.headers", ExchangeType.HEADERS),
    ("amq.match", ExchangeType.HEADERS),
)

NAME_BYTES_MAX: Final = 255
"""Maximum length of names: an AMQP short string. Routing keys of MQTT filters may be longer."""

NO_ARGUMENTS: Final[Arguments] = {}
"""The arguments of all bindings that have none. Never changed."""

REMOVED_PER_BATCH: Final = 500
"""Bindings removed in one batch, which takes a few milliseconds."""

EXCHANGE_ARGUMENTS: Final = ("alternate-exchange", DELAYED_TYPE, HEADER, PROPERTY)
"""Arguments of exchanges that have an effect, and must be equal when an exchange is declared again."""

_AUTO_DELETE: Final = 1
_INTERNAL: Final = 2


class Reached(NamedTuple):
    """Where a message goes."""

    queues: list[str]
    by_properties: bool
    """Whether more than the routing key decided."""
    is_delayed: bool
    """Whether a delayed exchange is on the way."""


class Topology:
    """The exchanges and bindings of one virtual host."""

    def __init__(self, store: Store, vhost: str, *, has_queue: Callable[[str], bool]) -> None:
        self.exchanges: dict[str, Exchange] = {"": Exchange("", ExchangeType.DIRECT)}
        self.version = 0
        """Incremented by every change. Routes cached under another version are stale."""
        self._store = store
        self._vhost = vhost
        self._has_queue = has_queue
        self._incoming: dict[Destination, dict[tuple[str, Destination, str, int], Binding]] = {}
        for name, kind in PREDECLARED:
            self.exchanges[name] = Exchange(name, kind)

    def load(
        self, is_durable_queue: Callable[[str], bool], is_unserved: Callable[[str], bool] | None = None
    ) -> list[str]:
        """Read the rows. Return one line about each binding that is not in use.

        Bindings without source or destination are removed, and auto-delete exchanges that lose their last binding. A
        crash between the deletion of a queue and of its bindings leaves such rows. Bindings to a queue that exists but
        cannot be served (`is_unserved`) keep their rows for the next start.
        """
        for key, row in self._rows(broker_keys.exchange_prefix()):
            exchange = decode_exchange(broker_keys.decode_exchange_key(key), row)
            self.exchanges[exchange.name] = exchange
        lines: list[str] = []
        losers: set[str] = set()
        batch = Batch()
        routing_key = ""
        for key, row in self._rows(broker_keys.binding_prefix()):
            before = routing_key
            source, kind, name, routing_key, number = broker_keys.decode_binding_key(key)
            if routing_key == before:
                # Many sessions of MQTT have the same filters. One string serves adjacent bindings.
                routing_key = before
            if kind == QUEUE and is_unserved is not None and is_unserved(name):
                lines.append(f"a binding from {source!r} to {name!r} is not in use because the queue is not served")
                continue
            exists = name in self.exchanges if kind == EXCHANGE else is_durable_queue(name)
            if source not in self.exchanges or not exists:
                lines.append(f"removed a binding from {source!r} to {name!r}: its source or destination is missing")
                losers.add(source)
                batch.delete(Family.TOPOLOGY, key)
                continue
            arguments = _decode_arguments(row[1:], f"a binding from {source!r} to {name!r}", row) or NO_ARGUMENTS
            source = self.exchanges[source].name
            self._link(Binding(source, Destination(kind, name), routing_key, arguments, number, True))
        if len(batch):
            self._store.write(batch)
        found = [self.exchanges[name] for name in sorted(losers) if name in self.exchanges]
        self._remove([], [each.name for each in found if each.auto_delete and not each.bindings])
        return lines

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(Family.TOPOLOGY, *key_parts.prefix_range(prefix))

    def get(self, name: str) -> Exchange:
        exchange = self.exchanges.get(name)
        if exchange is None:
            raise ExchangeNotFoundError(f"no exchange '{name}' in vhost '{self._vhost}'")
        return exchange

    def declare(
        self,
        name: str,
        kind: str,
        *,
        durable: bool = True,
        auto_delete: bool = False,
        internal: bool = False,
        arguments: Arguments | None = None,
        passive: bool = False,
    ) -> Exchange:
        """Return the exchange of this name, created if it is missing. Raises if an existing one differs."""
        found = self.exchanges.get(name)
        if name == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        if passive:
            return self.get(name)
        owner = Owner("exchange", name, self._vhost)
        try:
            wanted = ExchangeType(kind)
        except ValueError:
            raise UnknownExchangeTypeError(
                f"unknown exchange type '{kind}'; use one of {', '.join(ExchangeType)}"
            ) from None
        arguments = arguments or {}
        if found is not None:
            for field, has, asked in (
                ("type", found.type.value, wanted.value),
                ("durable", found.durable, durable),
                ("auto_delete", found.auto_delete, auto_delete),
                ("internal", found.internal, internal),
                *((each, found.arguments.get(each), arguments.get(each)) for each in EXCHANGE_ARGUMENTS),
            ):
                check_same(owner, field, has, asked)
            return found
        check_name("exchange name", name)
        if name.startswith("amq."):
            raise AccessRefusedError(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        check_exchange_arguments(owner, arguments)
        check_type_arguments(wanted, arguments)
        exchange = Exchange(
            name, wanted, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
        )
        if durable:
            batch = Batch()
            batch.put(Family.TOPOLOGY, broker_keys.exchange_key(name), encode_exchange(exchange))
            self._store.write(batch)
        self.exchanges[name] = exchange
        self.version += 1
        return exchange

    def delete(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange with the bindings from and to it; False if it does not exist."""
        if name == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        if name.startswith("amq."):
            raise AccessRefusedError(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return False
        if if_unused and exchange.bindings:
            raise PreconditionFailedError(f"exchange '{name}' in vhost '{self._vhost}' in use")
        self._remove([], [name])
        return True

    def bind(
        self, source: str, destination: Destination, routing_key: str, arguments: Arguments | None, *, durable: bool
    ) -> bool:
        """Bind a queue or exchange; False if that binding exists. `durable` says whether the destination is durable."""
        exchange = self.get(source)
        self._require_destination(destination)
        if source == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        check_name("routing key", routing_key, key_parts.STRING_BYTES_MAX)
        arguments = dict(arguments) if arguments else NO_ARGUMENTS
        check_binding(exchange, routing_key, arguments)
        binding = Binding(
            source, destination, routing_key, arguments, hash_arguments(arguments), exchange.durable and durable
        )
        if binding.identity in exchange.bindings:
            return False
        if binding.durable:
            batch = Batch()
            batch.put(Family.TOPOLOGY, _key(binding), bytes((LAYOUT,)) + amqp_table.encode(arguments))
            self._store.write(batch)
        self._link(binding)
        self.version += 1
        return True

    def unbind(
        self, source: str, destination: Destination, routing_key: str, arguments: Arguments | None
    ) -> Binding | None:
        """Remove and return a binding; None if it does not exist. The last one removes an auto-delete exchange too."""
        exchange = self.get(source)
        self._require_destination(destination)
        if source == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        binding = exchange.bindings.get((source, destination, routing_key, hash_arguments(arguments or {})))
        if binding is not None:
            self._remove([binding])
        return binding

    def removing(self, destination: Destination) -> Iterator[int]:
        """Remove bindings to a queue or exchange, and from the exchange, until few are left. Yield the count per batch.

        Use it before a deletion. After a crash in between, the object still exists with the remaining bindings.
        """
        while True:
            portion = list(islice(self._incoming.get(destination, {}).values(), REMOVED_PER_BATCH))
            exchange = self.exchanges.get(destination.name) if destination.kind == EXCHANGE else None
            if len(portion) < REMOVED_PER_BATCH and exchange is not None:
                portion = list(islice(exchange.bindings.values(), REMOVED_PER_BATCH))
            if len(portion) < REMOVED_PER_BATCH:
                return
            # Keep the last one, so that an auto-delete exchange is deleted together with the destination.
            self._remove(portion[:-1])
            yield len(portion) - 1

    def remove_queue(self, name: str) -> None:
        """Remove the bindings to a deleted queue."""
        gone = list(self._incoming.get(Destination(QUEUE, name), {}).values())
        if gone:
            self._remove(gone)
        self.version += 1

    def _remove(self, bindings: Iterable[Binding], exchanges: Iterable[str] = ()) -> None:
        """Remove bindings and exchanges with everything that depends on them, from disk in one batch and from memory.

        The bindings from and to a removed exchange are removed too. An auto-delete exchange is removed with its last
        binding, and so on.
        """
        to_delete = set(exchanges)
        pending = list(bindings)
        for name in to_delete:
            pending += self.exchanges[name].bindings.values()
            pending += self.bindings_to(Destination(EXCHANGE, name))
        gone: dict[tuple[str, Destination, str, int], Binding] = {}
        leaving: dict[str, int] = {}
        while pending:
            binding = pending.pop()
            if binding.identity in gone:
                continue
            gone[binding.identity] = binding
            leaving[binding.source] = leaving.get(binding.source, 0) + 1
            source = self.exchanges[binding.source]
            is_last = leaving[source.name] == len(source.bindings)
            if is_last and source.auto_delete and source.name not in to_delete:
                to_delete.add(source.name)
                pending += self.bindings_to(Destination(EXCHANGE, source.name))
        batch = Batch()
        for binding in gone.values():
            if binding.durable:
                batch.delete(Family.TOPOLOGY, _key(binding))
        for name in to_delete:
            if self.exchanges[name].durable:
                batch.delete(Family.TOPOLOGY, broker_keys.exchange_key(name))
        if len(batch):
            self._store.write(batch)
        for binding in gone.values():
            self._unlink(binding)
        for name in to_delete:
            del self.exchanges[name]
        self.version += 1

    def _link(self, binding: Binding) -> None:
        identity = binding.identity
        self.exchanges[binding.source].add(binding, identity)
        self._incoming.setdefault(binding.destination, {})[identity] = binding

    def _unlink(self, binding: Binding) -> None:
        self.exchanges[binding.source].remove(binding)
        incoming = self._incoming[binding.destination]
        del incoming[binding.identity]
        if not incoming:
            del self._incoming[binding.destination]

    def _require_destination(self, destination: Destination) -> None:
        if destination.kind == EXCHANGE:
            self.get(destination.name)
            if destination.name == "":
                raise AccessRefusedError("operation not permitted on the default exchange")
        elif not self._has_queue(destination.name):
            raise NotFoundError(f"no queue '{destination.name}' in vhost '{self._vhost}'")

    def bindings(self) -> Iterator[Binding]:
        """Yield all bindings except the implicit ones of the default exchange."""
        for exchange in list(self.exchanges.values()):
            yield from list(exchange.bindings.values())

    def bindings_to(self, destination: Destination) -> list[Binding]:
        return list(self._incoming.get(destination, {}).values())

    def route(
        self,
        exchange: Exchange,
        routing_keys: Sequence[str],
        headers: Arguments,
        properties: Properties | None = None,
    ) -> Reached:
        """Return the queues that a message reaches."""
        found: dict[str, None] = {}
        by_properties = is_delayed = False
        seen = {exchange.name}
        todo = [exchange]
        while todo:
            here = todo.pop()
            if here.name == "":
                reached = {Destination(QUEUE, key) for key in routing_keys if self._has_queue(key)}
            else:
                reached = here.table.match(routing_keys, headers, properties)
                by_properties = by_properties or here.table.reads_properties
                is_delayed = is_delayed or here.type is ExchangeType.DELAYED
            if not reached and here.alternate is not None:
                reached = {Destination(EXCHANGE, here.alternate)}
            for kind, name in reached:
                if kind == QUEUE:
                    found[name] = None
                elif name not in seen:
                    seen.add(name)
                    following = self.exchanges.get(name)
                    if following is not None:
                        todo.append(following)
        return Reached(list(found), by_properties, is_delayed)


def check_name(what: str, name: str, bytes_max: int = NAME_BYTES_MAX) -> None:
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgumentError(f"invalid {what} {name!r:.80}: it must be Unicode text") from None
    if size > bytes_max:
        raise InvalidArgumentError(f"invalid {what}: {size} bytes exceed the limit of {bytes_max}")


def hash_arguments(arguments: Arguments) -> int:
    """Return a hash of the arguments that does not depend on their order."""
    if not arguments:
        return 0
    raw = amqp_table.encode({name: arguments[name] for name in sorted(arguments)})
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def _key(binding: Binding) -> bytes:
    return broker_keys.binding_key(
        binding.source, binding.destination.kind, binding.destination.name, binding.routing_key, binding.number
    )


def encode_exchange(exchange: Exchange) -> bytes:
    flags = _AUTO_DELETE * exchange.auto_delete | _INTERNAL * exchange.internal
    return bytes((LAYOUT, flags)) + key_parts.lp(exchange.type.value) + amqp_table.encode(exchange.arguments)


def decode_exchange(name: str, row: bytes) -> Exchange:
    try:
        if row[0] != LAYOUT:
            raise ValueError
        kind, at = key_parts.take_lp(row, 2)
        exchange_type = ExchangeType(kind.decode())
    except (IndexError, ValueError, CorruptionError):
        raise CorruptionError(f"the row of exchange {name!r} is damaged ({len(row)} bytes)") from None
    return Exchange(
        name,
        exchange_type,
        auto_delete=bool(row[1] & _AUTO_DELETE),
        internal=bool(row[1] & _INTERNAL),
        arguments=_decode_arguments(row[at:], f"exchange {name!r}", row),
    )


def _decode_arguments(raw: bytes, what: str, row: bytes) -> Arguments:
    try:
        return amqp_table.decode_all(raw)
    except MalformedTableError as error:
        raise CorruptionError(f"the row of {what} is damaged ({len(row)} bytes): {error}") from None
