"""A queue in this process: enqueue, lease, settle.

    for message in queue.lease(10, wait=5):
        work(message.payload)
        queue.ack(message)

`enqueue` returns when the messages are as durable as the queue requires. This program holds a leased message until it
acks, nacks or releases it, or the lease expires. After that, settling it raises StaleLeaseError. Settling several
messages is all or nothing.

The async methods never block the event loop. Store access runs in a thread; waiting for the disk and for messages uses
no thread. A cancelled `lease_async` returns its messages. A cancelled `enqueue_async` may have taken effect.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, TypeAlias, overload

import msgspec

from basaltmq.durability import Durability, parse_durability
from basaltmq.embedded.leased import Leased
from basaltmq.embedded.readiness import Readiness, in_thread
from basaltmq.embedded.waiting import WaitLimit
from basaltmq.embedded.worker import Handler, Worker
from basaltmq.errors import InvalidArgumentError, InvalidConfigError
from basaltmq.queues.config import QueueConfig, queue_config
from basaltmq.queues.draft import FAIRNESS_KEY_DEFAULT, Draft, asks_for_more, require_fit
from basaltmq.queues.lifecycle.redrive import Wanted
from basaltmq.queues.message import Message
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.sync.group_commit import GroupCommit

Payload: TypeAlias = bytes | str | Draft
"""One message: its payload, or a `Draft` with all fields. Text is stored as UTF-8."""

Held: TypeAlias = Leased | Sequence[Leased]
"""What `lease` returned: one message, or several."""

WAIT_PIECE_S: Final = 3600.0
"""An endless wait is split into pieces, because operating systems limit the duration of one wait."""

PEEK: Final = 100
"""Messages per page of `browse`; their payloads are in memory meanwhile."""


class EmbeddedQueue:
    """One queue. Cheap to create and stateless."""

    def __init__(self, plane: QueuePlane, commit: GroupCommit, name: str, admit: Callable[[], None]) -> None:
        """`admit` raises an error if there is no disk space for producers."""
        self.name = name
        self._admit = admit
        self._plane = plane
        self._commit = commit

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    @property
    def config(self) -> QueueConfig:
        return self._plane.get(self.name)

    def alter(self, **changes: Any) -> QueueConfig:
        """Change settings. Messages in the queue stay unchanged."""
        if "name" in changes:
            raise InvalidConfigError(
                f"queue {self.name!r} cannot be renamed; create another queue and move the messages"
            )
        try:
            altered = queue_config(msgspec.to_builtins(self.config) | msgspec.to_builtins(changes))
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidConfigError(f"queue {self.name!r}: {error}") from error
        self._plane.update(altered)
        return altered

    @overload
    def enqueue(
        self,
        message: Payload,
        *,
        headers: dict[str, str] | None = None,
        fairness_key: str | None = None,
        priority: int | None = None,
        ttl_ms: int | None = None,
        delay_ms: int | None = None,
        dedup_id: bytes | str | None = None,
        durability: Durability | str | None = None,
    ) -> bytes: ...

    @overload
    def enqueue(
        self, message: list[Payload] | tuple[Payload, ...], *, durability: Durability | str | None = None
    ) -> list[bytes]: ...

    def enqueue(self, message: Any, *, durability: Durability | str | None = None, **fields: Any) -> Any:
        """Add one message or several (all or none). Return their ids when they are as durable as requested.

        Messages with more fields than a payload are `Draft`s, each with its own fields. A message whose `dedup_id` is
        known in the queue's window is not added; its id is that of the first.
        """
        self._admit()
        drafts, is_one = drafts_of(message, fields)
        if asks_for_more(drafts):
            require_fit(self.config, drafts)
        level = None if durability is None else parse_durability(durability)
        ids = self._plane.enqueue(self.name, drafts, durability=level)
        return ids[0] if is_one else ids

    def lease(
        self,
        count: int = 1,
        *,
        wait: float | None = 0,
        consumer: str = "",
        visibility_ms: int | None = None,
        size_bytes_max: int | None = None,
    ) -> list[Leased]:
        """Lease up to `count` messages for exclusive use.

        If none is ready, wait up to `wait` seconds for the first (0: do not wait, None: no limit). The lease lasts
        `visibility_ms`, by default the queue's visibility timeout. The payloads of one call have at most
        `size_bytes_max` bytes together (default and maximum: 64 MiB); a single larger message is returned alone.
        """
        _require_count(count)
        wait_limit = WaitLimit(wait)
        while True:
            left_s = min(wait_limit.left_s(), WAIT_PIECE_S)
            found = self._plane.lease(
                self.name,
                count,
                consumer=consumer,
                visibility_ms=visibility_ms,
                wait_ms=math.ceil(left_s * 1000),
                size_bytes_max=size_bytes_max,
            )
            if found:
                has_priorities = bool(self.config.priorities_max)
                return [Leased(self.name, delivery, has_priorities) for delivery in found]
            if not wait_limit.left_s():
                return []

    def ack(self, messages: Held) -> int:
        """Acknowledge messages. Return their number."""
        return self._settle(messages, self._plane.ack)

    def nack(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        """Negatively acknowledge messages. They are retried after `delay_ms` until their attempts are used up.

        With `reject` they go to the dead-letter queue at once, or are dropped if there is none.
        """

        def fail(name: str, token: int, ids: Sequence[bytes]) -> int:
            return self._plane.nack(name, token, ids, error=error, delay_ms=delay_ms, reject=reject)

        return self._settle(messages, fail)

    def release(self, messages: Held) -> int:
        """Return messages to their places in the queue. No attempt is counted."""
        return self._settle(messages, self._plane.release)

    def extend(self, messages: Held, visibility_ms: int | None = None) -> None:
        """Extend the leases of messages to `visibility_ms` from now (default: the queue's visibility timeout)."""
        by_token = self._by_token(messages)
        with self._together(by_token):
            tokens = {
                token: self._plane.extend(self.name, token, visibility_ms, [each.id for each in held])
                for token, held in by_token.items()
            }
        for token, held in by_token.items():
            for each in held:
                each.token = tokens[token]

    def extend_lease(self, token: int, visibility_ms: int | None = None) -> None:
        """Extend the whole lease with this token."""
        self._plane.extend(self.name, token, visibility_ms)

    def _settle(self, messages: Held, settle: Callable[[str, int, Sequence[bytes]], int]) -> int:
        by_token = self._by_token(messages)
        with self._together(by_token):
            count = sum(settle(self.name, token, [each.id for each in held]) for token, held in by_token.items())
        for held in by_token.values():
            for each in held:
                each.settled = True
        return count

    def _together(self, by_token: dict[int, list[Leased]]) -> AbstractContextManager[None]:
        """Open one change for messages of several leases; a single lease needs none."""
        return self._plane.change() if len(by_token) > 1 else nullcontext()

    def _by_token(self, messages: Held) -> dict[int, list[Leased]]:
        found: dict[int, list[Leased]] = {}
        for each in leased_list(messages):
            if each.queue != self.name:
                raise InvalidArgumentError(f"{each!r} cannot be settled in queue {self.name!r}")
            found.setdefault(each.token, []).append(each)
        return found

    def peek(self, count: int = PEEK) -> list[Message]:
        """Return the first ready messages by fairness key and age, unchanged."""
        _require_count(count)
        return self._plane.browse(self.name, count)

    def browse(self) -> Iterator[Message]:
        """Yield all ready messages in the order of `peek`, page by page. Concurrent arrivals and removals may be
        missed."""
        after = b""
        while True:
            page, after = self._plane.browse_page(self.name, PEEK, after=after)
            if not page:
                return
            yield from page

    def purge(self) -> int:
        """Delete all ready messages and return their number. Leased and delayed messages stay."""
        return self._plane.purge(self.name)

    def redrive(
        self,
        to: str | None = None,
        *,
        count: int | None = None,
        wanted: Wanted | None = None,
        rate_per_s: float | None = None,
    ) -> int:
        """Return dead letters to their original queues (or `to`) with attempts reset. Return their number."""
        return self._plane.redrive(self.name, to=to, count=count, wanted=wanted, rate_per_s=rate_per_s)

    def move(self, to: str, *, count: int | None = None, wanted: Wanted | None = None) -> int:
        """Move ready messages to the end of another queue. Return their number."""
        return self._plane.move(self.name, to, count=count, wanted=wanted)

    def stats(self) -> dict[str, int]:
        """Return counts: ready, leased, delayed, and totals since the queue was created."""
        return self._plane.stats(self.name)

    def worker(self, handler: Handler, *, concurrency: int = 1, batch: int = 1, **options: Any) -> Worker:
        """Return a worker that calls `handler` for each message and settles it. See `Worker` for the options."""
        return Worker(self, handler, concurrency=concurrency, batch=batch, **options)

    def readiness(self) -> Readiness:
        """Return a cancellable wait for this queue."""
        return Readiness(self._plane, self.name)

    async def enqueue_async(self, message: Any, *, durability: Durability | str | None = None, **fields: Any) -> Any:
        """Like `enqueue`. Waiting for the disk uses no thread, so any number of calls share its fsyncs."""
        self._admit()
        drafts, is_one = drafts_of(message, fields)
        if asks_for_more(drafts):
            require_fit(self.config, drafts)
        requested = None if durability is None else parse_durability(durability)

        def write() -> tuple[list[bytes], Durability]:
            ids = self._plane.enqueue(self.name, drafts, durability=Durability.WRITTEN)
            return ids, requested or self.config.durability

        ids, level = await asyncio.to_thread(write)
        if level is Durability.SYNCED:
            await self._commit.durable()
        return ids[0] if is_one else ids

    async def lease_async(
        self,
        count: int = 1,
        *,
        wait: float | None = 0,
        consumer: str = "",
        visibility_ms: int | None = None,
        size_bytes_max: int | None = None,
    ) -> list[Leased]:
        """Like `lease`. Waiting uses no thread."""
        _require_count(count)
        wait_limit = WaitLimit(wait)

        def lease() -> list[Leased]:
            return self.lease(count, consumer=consumer, visibility_ms=visibility_ms, size_bytes_max=size_bytes_max)

        while True:
            found = await in_thread(lease, self._release_all)
            left_s = wait_limit.left_s()
            if found or not left_s:
                return found
            await self.readiness().wait_async(left_s)

    def _release_all(self, messages: list[Leased]) -> None:
        if messages:
            self.release(messages)

    async def ack_async(self, messages: Held) -> int:
        return await asyncio.to_thread(self.ack, messages)

    async def nack_async(self, messages: Held, error: str = "", *, delay_ms: int = 0, reject: bool = False) -> int:
        return await asyncio.to_thread(self.nack, messages, error, delay_ms=delay_ms, reject=reject)

    async def release_async(self, messages: Held) -> int:
        return await asyncio.to_thread(self.release, messages)

    async def extend_async(self, messages: Held, visibility_ms: int | None = None) -> None:
        await asyncio.to_thread(self.extend, messages, visibility_ms)

    async def peek_async(self, count: int = PEEK) -> list[Message]:
        return await asyncio.to_thread(self.peek, count)

    async def purge_async(self) -> int:
        return await asyncio.to_thread(self.purge)

    async def redrive_async(self, to: str | None = None, **options: Any) -> int:
        return await asyncio.to_thread(self.redrive, to, **options)

    async def stats_async(self) -> dict[str, int]:
        return await asyncio.to_thread(self.stats)


def drafts_of(message: Any, fields: dict[str, Any]) -> tuple[list[Draft | bytes], bool]:
    """Convert the arguments of `enqueue` for the plane. Return the drafts, and whether a single message was given."""
    fields = {name: value for name, value in fields.items() if value is not None}
    if isinstance(message, bytes | str) and fields:
        return [_draft(_bytes(message), fields)], True
    if fields:
        raise InvalidArgumentError(
            f"{', '.join(fields)}: allowed for a single payload only; set them on each Draft instead"
        )
    if isinstance(message, list | tuple):
        return [_one(each) for each in message], False
    return [_one(message)], True


def _draft(payload: bytes, fields: dict[str, Any]) -> Draft:
    dedup_id = fields.get("dedup_id")
    if isinstance(dedup_id, str):
        fields["dedup_id"] = dedup_id.encode()
    fields.setdefault("fairness_key", FAIRNESS_KEY_DEFAULT)
    try:
        return Draft(payload=payload, **fields)
    except TypeError as error:
        raise InvalidArgumentError(f"unknown field of a message: {error}") from None


def _one(message: object) -> Draft | bytes:
    if isinstance(message, bytes | str):
        return _bytes(message)
    if isinstance(message, Draft):
        return message
    raise InvalidArgumentError(
        f"a message must be bytes, text, a Draft or a list of them, not {type(message).__name__}"
    )


def _bytes(payload: bytes | str) -> bytes:
    if isinstance(payload, bytes):
        return payload
    try:
        return payload.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"text to enqueue cannot be stored as UTF-8: {error}") from None


def leased_list(messages: Held) -> list[Leased]:
    """Return what `lease` returned, one message or several, as a list."""
    given: list[Any] = list(messages) if isinstance(messages, list | tuple) else [messages]
    for each in given:
        if not isinstance(each, Leased):
            raise InvalidArgumentError(f"pass what lease returned, one message or a list, not {type(each).__name__}")
    return given


def _require_count(count: object) -> None:
    if type(count) is not int or count < 1:
        raise InvalidArgumentError(f"count must be 1 or more, not {count!r:.80}")
