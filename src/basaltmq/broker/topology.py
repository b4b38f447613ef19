"""Exchanges and bindings of a virtual host: what is bound to what, and where a message goes.

Everything is in memory; what is durable is in rows as well, written with each change and read at open:

    exchange   name                                             ->  | layout u8 | flags u8 | lp(type) | arguments |
    binding    source, kind, destination, key, arguments' hash  ->  | layout u8 | arguments |

Arguments are an AMQP field table. A binding is durable if both its ends are. A row that leads to a queue or exchange
that is gone (its deletion was cut off by a crash before anybody was told of it) is removed at open.

Routing walks from exchange to exchange and visits each once, so cycles of bindings and of alternate exchanges end. An
exchange none of whose bindings takes the message hands it to its alternate exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from basaltmq.broker import amqp_table
from basaltmq.broker.arguments import Owner, check_exchange_arguments, check_same
from basaltmq.broker.exchange import (
    EXCHANGE,
    QUEUE,
    Arguments,
    Binding,
    Destination,
    Exchange,
    ExchangeType,
    wanted_headers,
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
from basaltmq.store import keys
from basaltmq.store.api import Store
from basaltmq.store.batch import Batch
from basaltmq.store.families import Family

LAYOUT: Final = 1

PREDECLARED: Final = (
    ("amq.direct", ExchangeType.DIRECT),
    ("amq.fanout", ExchangeType.FANOUT),
    ("amq.topic", ExchangeType.TOPIC),
    ("amq.headers", ExchangeType.HEADERS),
    ("amq.match", ExchangeType.HEADERS),
)

NAME_BYTES_MAX: Final = 255
"""AMQP's short string, of names and routing keys."""

_AUTO_DELETE: Final = 1
_INTERNAL: Final = 2


class Topology:
    """The exchanges and bindings of one virtual host."""

    def __init__(self, store: Store, vhost: str, *, has_queue: Callable[[str], bool]) -> None:
        self.exchanges: dict[str, Exchange] = {"": Exchange("", ExchangeType.DIRECT)}
        self.version = 0
        """Raised by every change; routes found under another version are stale."""
        self._store = store
        self._vhost = vhost
        self._has_queue = has_queue
        self._incoming: dict[Destination, dict[tuple[str, Destination, str, int], Binding]] = {}
        for name, kind in PREDECLARED:
            self.exchanges[name] = Exchange(name, kind)

    def load(self, is_durable_queue: Callable[[str], bool]) -> list[str]:
        """Read the rows; what was found without its ends, in one line each, and was removed."""
        for key, row in self._rows(keys.exchange_prefix()):
            exchange = decode_exchange(keys.decode_exchange_key(key), row)
            self.exchanges[exchange.name] = exchange
        lost: list[str] = []
        batch = Batch()
        for key, row in self._rows(keys.binding_prefix()):
            source, kind, name, routing_key, number = keys.decode_binding_key(key)
            exists = name in self.exchanges if kind == EXCHANGE else is_durable_queue(name)
            if source not in self.exchanges or not exists:
                lost.append(f"a binding from {source!r} to {name!r} lost one of its ends and was removed")
                batch.delete(Family.TOPOLOGY, key)
                continue
            arguments = _decode_arguments(row[1:], f"a binding from {source!r} to {name!r}", row)
            self._link(Binding(source, Destination(kind, name), routing_key, arguments, number, True))
        if len(batch):
            self._store.write(batch)
        self.version += 1
        return lost

    def _rows(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        return self._store.scan(Family.TOPOLOGY, *keys.prefix_range(prefix))

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
        """The exchange of this name, made if it is missing; what exists must be what is asked for."""
        found = self.exchanges.get(name)
        if passive:
            return self.get(name)
        owner = Owner("exchange", name, self._vhost)
        if name == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        try:
            wanted = ExchangeType(kind)
        except ValueError:
            raise UnknownExchangeTypeError(
                f"unknown exchange type '{kind}'; there are {', '.join(ExchangeType)}"
            ) from None
        arguments = arguments or {}
        if found is not None:
            for field, has, asked in (
                ("type", found.type.value, wanted.value),
                ("durable", found.durable, durable),
                ("auto_delete", found.auto_delete, auto_delete),
                ("internal", found.internal, internal),
                ("alternate-exchange", found.arguments.get("alternate-exchange"), arguments.get("alternate-exchange")),
            ):
                check_same(owner, field, has, asked)
            return found
        check_name("exchange", name)
        if name.startswith("amq."):
            raise AccessRefusedError(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        check_exchange_arguments(owner, arguments)
        exchange = Exchange(
            name, wanted, durable=durable, auto_delete=auto_delete, internal=internal, arguments=arguments
        )
        if durable:
            batch = Batch()
            batch.put(Family.TOPOLOGY, keys.exchange_key(name), encode_exchange(exchange))
            self._store.write(batch)
        self.exchanges[name] = exchange
        self.version += 1
        return exchange

    def delete(self, name: str, *, if_unused: bool = False) -> bool:
        """Delete an exchange with the bindings from and to it; False if there was none."""
        if name == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        if name.startswith("amq."):
            raise AccessRefusedError(f"exchange name '{name}' contains reserved prefix 'amq.*'")
        exchange = self.exchanges.get(name)
        if exchange is None:
            return False
        if if_unused and exchange.bindings:
            raise PreconditionFailedError(f"exchange '{name}' in vhost '{self._vhost}' in use")
        batch = Batch()
        batch.delete(Family.TOPOLOGY, keys.exchange_key(name))
        gone = [*exchange.bindings.values(), *self._incoming.get(Destination(EXCHANGE, name), {}).values()]
        self._forget(batch, gone, keep=name)
        self._store.write(batch)
        self._apply_forgotten(gone, {name})
        return True

    def bind(
        self, source: str, destination: Destination, routing_key: str, arguments: Arguments | None, *, durable: bool
    ) -> bool:
        """Bind a queue or exchange; False if that binding exists. `durable`: the destination is."""
        exchange = self._source(source)
        self._require_destination(destination)
        if source == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        check_name("routing key", routing_key)
        arguments = dict(arguments or {})
        if exchange.type is ExchangeType.HEADERS:
            wanted_headers(arguments)
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
        """Take a binding away, and the exchange too if that was its last and it asked for it. None: there was none."""
        exchange = self._source(source)
        self._require_destination(destination)
        if source == "":
            raise AccessRefusedError("operation not permitted on the default exchange")
        binding = exchange.bindings.get((source, destination, routing_key, hash_arguments(arguments or {})))
        if binding is not None:
            self._remove([binding])
        return binding

    def remove_queue(self, name: str) -> None:
        """A queue is gone: so are the bindings to it."""
        gone = list(self._incoming.get(Destination(QUEUE, name), {}).values())
        if gone:
            self._remove(gone)
        self.version += 1

    def _remove(self, gone: Sequence[Binding]) -> None:
        batch = Batch()
        doomed = self._forget(batch, gone)
        if len(batch):
            self._store.write(batch)
        self._apply_forgotten(gone, doomed)

    def _forget(self, batch: Batch, gone: Sequence[Binding], keep: str = "") -> set[str]:
        """Stage the removal of bindings; the auto-delete exchanges that lose their last one go along."""
        leaving: dict[str, int] = {}
        for binding in gone:
            if binding.durable:
                batch.delete(Family.TOPOLOGY, _key(binding))
            leaving[binding.source] = leaving.get(binding.source, 0) + 1
        doomed = set()
        for source, count in leaving.items():
            exchange = self.exchanges[source]
            if exchange.auto_delete and source != keep and len(exchange.bindings) == count:
                doomed.add(source)
                batch.delete(Family.TOPOLOGY, keys.exchange_key(source))
        return doomed

    def _apply_forgotten(self, gone: Sequence[Binding], doomed: Iterable[str]) -> None:
        for binding in gone:
            exchange = self.exchanges[binding.source]
            if binding.identity in exchange.bindings:
                exchange.remove(binding)
                incoming = self._incoming[binding.destination]
                del incoming[binding.identity]
                if not incoming:
                    del self._incoming[binding.destination]
        self.version += 1
        for name in doomed:
            self.exchanges.pop(name, None)
            rest = list(self._incoming.get(Destination(EXCHANGE, name), {}).values())
            if rest:
                self._remove(rest)

    def _link(self, binding: Binding) -> None:
        self.exchanges[binding.source].add(binding)
        self._incoming.setdefault(binding.destination, {})[binding.identity] = binding

    def _source(self, name: str) -> Exchange:
        return self.get(name)

    def _require_destination(self, destination: Destination) -> None:
        if destination.kind == EXCHANGE:
            self.get(destination.name)
            if destination.name == "":
                raise AccessRefusedError("operation not permitted on the default exchange")
        elif not self._has_queue(destination.name):
            raise NotFoundError(f"no queue '{destination.name}' in vhost '{self._vhost}'")

    def bindings(self) -> Iterator[Binding]:
        """Every binding but the default exchange's, which nobody makes."""
        for exchange in list(self.exchanges.values()):
            yield from list(exchange.bindings.values())

    def bindings_to(self, destination: Destination) -> list[Binding]:
        return list(self._incoming.get(destination, {}).values())

    def route(self, exchange: Exchange, routing_keys: Sequence[str], headers: Arguments) -> tuple[list[str], bool]:
        """The queues a message reaches, and whether its headers had a say."""
        found: dict[str, None] = {}
        by_headers = False
        seen = {exchange.name}
        todo = [exchange]
        while todo:
            here = todo.pop()
            if here.name == "":
                reached = {Destination(QUEUE, key) for key in routing_keys if self._has_queue(key)}
            else:
                reached = here.table.match(routing_keys, headers)
                by_headers = by_headers or here.type is ExchangeType.HEADERS
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
        return list(found), by_headers


def check_name(what: str, name: str) -> None:
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgumentError(f"a {what} is Unicode text, not {name!r:.80}") from None
    if size > NAME_BYTES_MAX:
        raise InvalidArgumentError(f"a {what} of {size} bytes is over the limit of {NAME_BYTES_MAX}")


def hash_arguments(arguments: Arguments) -> int:
    """The same number for the same arguments, in whatever order they come."""
    if not arguments:
        return 0
    raw = amqp_table.encode({name: arguments[name] for name in sorted(arguments)})
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def _key(binding: Binding) -> bytes:
    return keys.binding_key(
        binding.source, binding.destination.kind, binding.destination.name, binding.routing_key, binding.number
    )


def encode_exchange(exchange: Exchange) -> bytes:
    flags = _AUTO_DELETE * exchange.auto_delete | _INTERNAL * exchange.internal
    return bytes((LAYOUT, flags)) + keys.lp(exchange.type.value) + amqp_table.encode(exchange.arguments)


def decode_exchange(name: str, row: bytes) -> Exchange:
    try:
        if row[0] != LAYOUT:
            raise ValueError
        kind, at = keys.take_lp(row, 2)
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
