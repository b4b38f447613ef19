"""The queues of a virtual host: declared, found, given up.

A queue is here while it exists; what the plane below keeps of it survives a restart if it is durable and not
exclusive, and everything else is deleted when the virtual host opens. Deleting takes the messages first, then the
bindings: a crash in between leaves bindings to nothing, which opening removes.

Unused queues (x-expires) are looked for by one heap of times. A queue is used while it has consumers, and whenever it
is declared or read from; after a restart the time begins again.
"""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import islice
from typing import Final

import msgspec

from basaltmq.broker.consumers.consumer import Consumer
from basaltmq.broker.consumers.queue import (
    BrokerQueue,
    Declared,
    QueueInfo,
    declared_settings,
    effective,
    plane_config,
)
from basaltmq.broker.consumers.stream_queue import StreamQueues
from basaltmq.broker.routing.arguments import STREAM, Owner, QueueSettings, check_same, check_same_arguments
from basaltmq.broker.routing.exchange import Arguments
from basaltmq.broker.routing.policy import Policies
from basaltmq.broker.routing.topology import Topology, check_name
from basaltmq.errors import (
    AccessRefusedError,
    BasaltError,
    CorruptionError,
    PreconditionFailedError,
    QueueNotFoundError,
    ResourceLockedError,
)
from basaltmq.queues.config import QueueConfig
from basaltmq.queues.plane import QueuePlane

GENERATED: Final = "amq.gen-"
"""What the names of queues begin with that clients leave to the server."""

PAGE: Final = 1000
"""Queues read at once when opening."""

DELETED_AT_ONCE: Final = 50
CONFIGURED_AT_ONCE: Final = 100
"""Queues deleted, or given another policy, before others have their turn: some milliseconds."""

COUNTED: Final = ("published", "delivered", "redelivered", "acked")
COUNTED_BELOW: Final = ("expired", "dead_lettered", "dropped")
"""Counts of a queue here, and in the plane below."""

_MS: Final = 1_000_000


class QueueTable:
    """Queues by name."""

    def __init__(
        self,
        vhost: str,
        plane: QueuePlane,
        streams: StreamQueues,
        policies: Policies,
        *,
        clock_ns: Callable[[], int],
        wake: Callable[[BrokerQueue], None],
        gone: Callable[[BrokerQueue], None],
        due: Callable[[int], None],
    ) -> None:
        """`wake`: a consumer can take something. `gone`: the queue is deleted. `due`: call `expire` then."""
        self.by_name: dict[str, BrokerQueue] = {}
        self.retired = dict.fromkeys((*COUNTED, *COUNTED_BELOW), 0)
        """What queues that are gone had counted, so that sums over a virtual host never fall."""
        self.unserved: set[str] = set()
        """Queues that exist on disk and could not be loaded."""
        self._vhost = vhost
        self._plane = plane
        self._streams = streams
        self._policies = policies
        self._clock_ns = clock_ns
        self._wake = wake
        self._gone = gone
        self._due = due
        self._exclusive: dict[object, dict[str, None]] = {}
        self._consuming: dict[object, dict[Consumer, None]] = {}
        self._expiries: list[tuple[int, str]] = []
        self.topology: Topology

    def load(self) -> list[str]:
        """Read what survived; delete what was not to. Lines about what could not be read."""
        faults: list[str] = []
        after = ""
        while page := self._plane.configs(after=after, count=PAGE):
            after = page[-1].name
            for config in page:
                try:
                    declared = Declared.decode(config.name, config.extra)
                except CorruptionError as error:
                    faults.append(f"{error}; it is served as a durable queue without arguments")
                    declared = Declared()
                if not declared.survives:
                    self._plane.delete(config.name)
                    continue
                try:
                    self._add(config.name, declared, None)
                except BasaltError as error:
                    self.unserved.add(config.name)
                    faults.append(f"queue {config.name!r} is not served: {error}")
        return faults

    def get(self, name: str, owner: object = None) -> BrokerQueue:
        """The queue of this name, if this connection may touch it."""
        queue = self.by_name.get(name)
        if queue is None:
            raise QueueNotFoundError(f"no queue '{name}' in vhost '{self._vhost}'")
        if queue.owner is not None and queue.owner is not owner:
            raise ResourceLockedError(
                f"cannot obtain exclusive access to locked queue '{name}' in vhost '{self._vhost}'. It could be "
                "originally declared on another connection or the exclusive property value does not match that of "
                "the original declaration."
            )
        return queue

    def declare(
        self,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Arguments,
        passive: bool,
        owner: object,
    ) -> QueueInfo:
        if name == "":
            name = self._generated() if not passive else name
        elif name not in self.by_name and not passive and name.startswith("amq."):
            raise AccessRefusedError(f"queue name '{name}' contains reserved prefix 'amq.*'")
        if passive or name in self.by_name:
            queue = self.get(name, owner)
            if not passive:
                self._check_same(queue, durable, exclusive, auto_delete, arguments)
            queue.used_ns = self._clock_ns()
            return self.info(queue)
        check_name("queue name", name)
        declared, settings = declared_settings(
            self._vhost, name, durable=durable, exclusive=exclusive, auto_delete=auto_delete, arguments=arguments
        )
        queue = self._make(name, declared, owner if exclusive else None)
        settings = queue.settings
        if settings.type == STREAM:
            self._streams.create(queue)
        self._plane.create(plane_config(name, declared, settings))
        self._put(queue)
        return QueueInfo(name, 0, 0)

    def adopt(self, config: QueueConfig) -> None:
        """Make a queue of a configuration that is not a declaration's, and the dead-letter queue it names."""
        check_name("queue name", config.name)
        self._plane.create(config)
        for name in (config.name, config.dead_letter_queue):
            if name is not None and name not in self.by_name:
                self._add(name, Declared(), None)

    def notice(self, name: str) -> BrokerQueue | None:
        """A queue that the plane made by itself, for messages that were given up; None if there is no such queue."""
        try:
            return self._add(name, Declared.decode(name, self._plane.get(name).extra), None)
        except BasaltError:
            # It is gone again, or cannot be served, which was said when the virtual host opened.
            return None

    def _generated(self) -> str:
        return GENERATED + urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")

    def _check_same(
        self, queue: BrokerQueue, durable: bool, exclusive: bool, auto_delete: bool, arguments: Arguments
    ) -> None:
        declared = queue.declared
        whose = Owner("queue", queue.name, self._vhost)
        check_same(whose, "durable", declared.durable, durable)
        check_same(whose, "auto_delete", declared.auto_delete, auto_delete)
        check_same(whose, "exclusive", declared.exclusive, exclusive)
        check_same_arguments(whose, declared.arguments, arguments)

    def _make(self, name: str, declared: Declared, owner: object) -> BrokerQueue:
        _, settings = declared_settings(
            self._vhost,
            name,
            durable=declared.durable,
            exclusive=declared.exclusive,
            auto_delete=declared.auto_delete,
            arguments=declared.arguments,
        )
        queue = BrokerQueue(
            name, declared, settings, owner=owner, used_ns=self._clock_ns(), wake=self._wake, left=self._left
        )
        policy = self._policies.of_queue(name, settings.type)
        queue.policy = policy.name
        queue.configure(effective(settings, policy.definition))
        return queue

    def _add(self, name: str, declared: Declared, owner: object) -> BrokerQueue:
        queue = self._make(name, declared, owner)
        if queue.is_stream:
            self._streams.attach(queue)
        self._put(queue)
        return queue

    def _put(self, queue: BrokerQueue) -> None:
        self.by_name[queue.name] = queue
        if queue.owner is not None:
            self._exclusive.setdefault(queue.owner, {})[queue.name] = None
        self._watch(queue)
        self.topology.version += 1

    def info(self, queue: BrokerQueue) -> QueueInfo:
        return QueueInfo(queue.name, self.ready(queue), len(queue.consumers))

    def ready(self, queue: BrokerQueue) -> int:
        """Messages that wait for a consumer."""
        if queue.is_stream:
            return self._streams.depth(queue)
        return self._plane.stats(queue.name)["ready"]

    def delete(self, name: str, *, if_unused: bool = False, if_empty: bool = False, owner: object = None) -> int:
        """Delete a queue; how many messages were ready. None of that name is nothing to delete."""
        ready = self.check_delete(name, if_unused=if_unused, if_empty=if_empty, owner=owner)
        if name in self.by_name:
            self._delete(self.by_name[name])
        return ready

    def check_delete(self, name: str, *, if_unused: bool, if_empty: bool, owner: object) -> int:
        """Refuse what must not be deleted; how many messages are ready."""
        if name not in self.by_name:
            return 0
        queue = self.get(name, owner)
        if if_unused and len(queue.consumers):
            raise PreconditionFailedError(f"queue '{name}' in vhost '{self._vhost}' in use")
        ready = self.ready(queue)
        if if_empty and ready:
            raise PreconditionFailedError(f"queue '{name}' in vhost '{self._vhost}' not empty")
        return ready

    def _delete(self, queue: BrokerQueue) -> None:
        for field in COUNTED:
            self.retired[field] += getattr(queue, field)
        if queue.is_stream:
            self._streams.delete(queue)
        else:
            counts = self._plane.stats(queue.name)
            for field in COUNTED_BELOW:
                self.retired[field] += counts[field]
        self._plane.delete(queue.name)
        del self.by_name[queue.name]
        if queue.owner is not None:
            mine = self._exclusive.get(queue.owner, {})
            mine.pop(queue.name, None)
            if not mine:
                self._exclusive.pop(queue.owner, None)
        self.topology.remove_queue(queue.name)
        for consumer in queue.consumers:
            consumer.cancel()
            consumer.sink.cancelled(consumer)
        self._gone(queue)

    def consuming(self, consumer: Consumer) -> None:
        """Somebody begins to consume."""
        consumer.queue.used_ns = self._clock_ns()
        self._consuming.setdefault(consumer.owner, {})[consumer] = None
        consumer.queue.consumers.add(consumer)

    def release_owner(self, owner: object) -> bool:
        """A connection is gone, and its consumers and exclusive queues with it. True: call again, some are left."""
        for consumer in list(self._consuming.get(owner, ())):
            consumer.cancel()
        for name in list(islice(self._exclusive.get(owner, ()), DELETED_AT_ONCE)):
            queue = self.by_name.get(name)
            if queue is not None:
                self._delete(queue)
        return owner in self._exclusive

    def _left(self, queue: BrokerQueue, consumer: Consumer) -> None:
        queue.used_ns = self._clock_ns()
        theirs = self._consuming.get(consumer.owner)
        if theirs is not None:
            theirs.pop(consumer, None)
            if not theirs:
                del self._consuming[consumer.owner]
        if queue.declared.auto_delete and not len(queue.consumers) and self.by_name.get(queue.name) is queue:
            self._delete(queue)

    def policies_changed(self) -> Callable[[], bool]:
        """Give every queue the policy that is in force for it: a portion per call, False after the last."""
        left = iter(list(self.by_name.values()))
        retried: list[BrokerQueue] = []

        def apply() -> bool:
            portion = retried or list(islice(left, CONFIGURED_AT_ONCE))
            retried[:] = portion
            self._apply_policies([queue for queue in portion if self.by_name.get(queue.name) is queue])
            retried.clear()
            return len(portion) == CONFIGURED_AT_ONCE

        return apply

    def _apply_policies(self, queues: list[BrokerQueue]) -> None:
        for queue in queues:
            policy = self._policies.of_queue(queue.name, queue.settings_declared.type)
            queue.policy = policy.name
            settings = effective(queue.settings_declared, policy.definition)
            if settings == queue.settings:
                continue
            if queue.is_stream:
                self._streams.alter(queue, settings)
            else:
                self._plane.update(self._under_policy(queue, settings))
            queue.configure(settings)
            self._watch(queue)
        self.topology.version += 1

    def _under_policy(self, queue: BrokerQueue, settings: QueueSettings) -> QueueConfig:
        """What the plane is told; of a queue that was adopted, what policies have no word for stays."""
        config = plane_config(queue.name, queue.declared, settings)
        before = self._plane.get(queue.name)
        if before.extra:
            return config
        return msgspec.structs.replace(
            before,
            ttl_ms=config.ttl_ms,
            length_max=config.length_max,
            bytes_max=config.bytes_max,
            overflow=config.overflow,
            delivery_limit=config.delivery_limit,
        )

    def _watch(self, queue: BrokerQueue) -> None:
        if queue.settings.expires_ms is not None:
            due_ns = queue.used_ns + queue.settings.expires_ms * _MS
            heappush(self._expiries, (due_ns, queue.name))
            self._due(due_ns)

    def expire(self, now_ns: int) -> int | None:
        """Delete queues that were unused for too long, some at a time; when to look again."""
        for _ in range(DELETED_AT_ONCE):
            if not self._expiries or self._expiries[0][0] > now_ns:
                break
            _, name = heappop(self._expiries)
            queue = self.by_name.get(name)
            if queue is None or queue.settings.expires_ms is None:
                continue
            if len(queue.consumers):
                queue.used_ns = now_ns
            due_ns = queue.used_ns + queue.settings.expires_ms * _MS
            if due_ns <= now_ns:
                self._delete(queue)
            else:
                heappush(self._expiries, (due_ns, name))
        return self._expiries[0][0] if self._expiries else None

    def __iter__(self) -> Iterator[BrokerQueue]:
        return iter(list(self.by_name.values()))

    def __len__(self) -> int:
        return len(self.by_name)
