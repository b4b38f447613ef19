"""The state of one group on one topic: a cursor per partition and a lease per received record. No I/O.

    offset   ... 40  41  42  43  44 | 45 46 ...
                 ok  L   ok  L   W  |
                                    ^ cursor: the group's committed offset

A record below the cursor that has no lease is settled. A lease is held (a consumer has the record until a time), ready
(the time has passed, or its consumer returned it), or waiting (an earlier record of its message group is not settled).

Invariants:

- The cursor, the new leases and the renewed leases of one receive call are one batch. So a record is either above the
  cursor, or it has a lease, or it was settled. A crash cannot lose or hide one.
- A lease has a token, chosen anew at each delivery. Only the current token settles the record. A token is valid until
  its time has passed or the record is delivered again.
- Records of a message group in a partition form a chain in offset order. Only its first record can be held. In an
  ordered group the first records may be held together, by one receive call, because that consumer processes them in
  order. When the first record is delivered again, the leases of the later ones end, so that no consumer processes them
  before it.

The leases are in memory while the group is in use, at most `HELD_MAX`. Then the cursors stop until consumers settle.
The rows are written without waiting for the sync at delivery: after a power loss the records are delivered again, as
after any lost delivery. A settlement is confirmed after the sync.

Rejected: a bit map of the settled records per receive call, as rows of 32 records. It saves rows at delivery, but each
settlement rewrites the row, and a redelivered record needs a separate row anyway. Rejected: a copy of failed records in
a retry topic. With leases, a retry costs one row and keeps its place in the chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Final

from basaltmq.streams.pop.lease import Lease

HELD_MAX: Final = 20_000
"""Leases per group and topic: about 6 MB."""

ALL_HELD_MAX: Final = 1_000_000
"""Leases of all groups and topics in memory: about 300 MB. At the limit nothing new is delivered until some settle."""

CLOCK_BACK_MS: Final = 1_000
"""A clock that is set back by more than this restarts the time of held leases. Otherwise they would last longer by as
much, which may be hours."""

EXPIRED_PER_CALL: Final = 1_000
"""Maximum leases that one call expires: 1 ms."""

Place = tuple[int, int]
"""Partition and offset."""


class Held:
    """The number of leases in memory, which all subscriptions share."""

    __slots__ = ("count", "limit")

    def __init__(self, limit: int = ALL_HELD_MAX) -> None:
        self.count = 0
        self.limit = limit

    @property
    def is_full(self) -> bool:
        return self.count >= self.limit


class Subscription:
    """The cursors and leases of a group on a topic."""

    def __init__(
        self,
        cursors: Mapping[int, int],
        leases: Iterable[Lease],
        now_ms: int,
        new_token: Callable[[], int],
        held: Held | None = None,
    ) -> None:
        self._held = held or Held()
        self.cursors = dict(cursors)
        """The next offset to receive, by partition."""
        self.leases: dict[Place, Lease] = {}
        self.changed: dict[Place, Lease | None] = {}
        """Leases to write, or to delete if None."""
        self.moved: set[int] = set()
        """Partitions whose cursor is to be written."""
        self._new_token = new_token
        self._chains: dict[tuple[int, bytes], deque[int]] = {}
        self._due: list[tuple[int, Place]] = []
        self._ready: list[tuple[int, Place]] = []
        self._attempts: dict[int, set[Place]] = {}
        self._seen_ms = now_ms
        for lease in sorted(leases, key=lambda each: each.place):
            self._add(lease)
            if lease.token:
                self._due.append((lease.until_ms, lease.place))
                if lease.attempt:
                    self._attempts.setdefault(lease.attempt, set()).add(lease.place)
            elif self._is_first(lease):
                self._ready.append((now_ms, lease.place))
        heapify(self._due)
        heapify(self._ready)
        self._restart_later_than(now_ms)

    @property
    def is_full(self) -> bool:
        return len(self.leases) >= HELD_MAX or self._held.is_full

    def close(self) -> None:
        """Stop counting the leases, because the state is no longer in memory."""
        self._held.count -= len(self.leases)

    def is_chained(self, partition: int, message_group: bytes) -> bool:
        """Whether a record of this message group is not settled."""
        return (partition, message_group) in self._chains

    def advance(self, partition: int, next_offset: int) -> None:
        """Move a cursor."""
        self.cursors[partition] = next_offset
        self.moved.add(partition)

    def admit(self, partition: int, offset: int, message_group: bytes) -> Lease:
        """Add the lease of a record that the cursor passes. The caller holds it at once, unless it waits for an earlier
        record of its message group."""
        place = (partition, offset)
        known = self.leases.get(place)
        if known is not None:
            # The cursor was moved back. The token of the earlier delivery is no longer valid.
            self._release(known)
            self.changed[place] = known
            return known
        lease = Lease(partition, offset, message_group)
        self._add(lease)
        self.changed[place] = lease
        return lease

    def hold(self, lease: Lease, now_ms: int, until_ms: int, attempt: int = 0, holder: int = 0) -> None:
        """Deliver the record of a lease."""
        self._release(lease)
        lease.token = self._new_token()
        lease.until_ms, lease.leased_ms = until_ms, now_ms
        lease.attempts += 1
        lease.attempt, lease.holder = attempt, holder
        if attempt:
            self._attempts.setdefault(attempt, set()).add(lease.place)
        self.changed[lease.place] = lease
        heappush(self._due, (until_ms, lease.place))

    def expire(self, now_ms: int, is_alive: Callable[[Lease], int]) -> None:
        """Make records ready whose time has passed. `is_alive` returns until when a lease is extended, or 0."""
        if now_ms < self._seen_ms - CLOCK_BACK_MS:
            self._restart_later_than(now_ms)
        self._seen_ms = now_ms
        for _ in range(EXPIRED_PER_CALL):
            if not self._due or self._due[0][0] > now_ms:
                return
            until_ms, place = heappop(self._due)
            lease = self.leases.get(place)
            if lease is None or not lease.token or lease.until_ms != until_ms:
                continue
            longer_ms = is_alive(lease) if lease.holder else 0
            if longer_ms > now_ms:
                # The row keeps the old time. After a crash the client has that long to appear again.
                lease.until_ms = longer_ms
                heappush(self._due, (longer_ms, place))
            else:
                self._free(lease, until_ms)

    def _restart_later_than(self, now_ms: int) -> None:
        """Restart the leases that began after this time, because the clock was set back."""
        for lease in self.leases.values():
            if lease.token and lease.leased_ms > now_ms + CLOCK_BACK_MS:
                lease.until_ms -= lease.leased_ms - now_ms
                lease.leased_ms = now_ms
                self.changed[lease.place] = lease
                heappush(self._due, (lease.until_ms, lease.place))

    def next_due_ms(self) -> int | None:
        """Return when the next lease may expire."""
        return self._due[0][0] if self._due else None

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def ready(self, is_ordered: bool) -> Iterator[Lease]:
        """Yield leases to deliver again, the longest ready first. The caller holds or settles each before the next."""
        while self._ready:
            _, place = heappop(self._ready)
            lease = self.leases.get(place)
            if lease is None or lease.token or not self._is_first(lease):
                continue
            chain = self._chains.get((lease.partition, lease.message_group)) if lease.message_group else None
            followers = [] if chain is None else [self.leases[lease.partition, offset] for offset in list(chain)[1:]]
            for follower in followers:
                if follower.token:
                    self._release(follower)
                    self.changed[follower.place] = follower
            yield lease
            if not is_ordered:
                continue
            for follower in followers:
                if not self._may_follow(lease, follower):
                    break
                yield follower

    def _may_follow(self, first: Lease, follower: Lease) -> bool:
        """Whether a later record of a chain may be delivered with the first, which was held or settled meanwhile."""
        return bool(first.token) and follower.place in self.leases and not follower.token

    def put_back(self, lease: Lease, now_ms: int) -> None:
        """Make a lease ready again that `ready` has yielded and the caller has not held."""
        if not lease.token and lease.place in self.leases and self._is_first(lease):
            heappush(self._ready, (now_ms, lease.place))

    def held(self, partition: int, offset: int, token: int, now_ms: int) -> Lease | None:
        """Return the lease of this token, or None if the token is no longer valid."""
        lease = self.leases.get((partition, offset))
        if lease is None or not token or lease.token != token or lease.until_ms <= now_ms:
            return None
        return lease

    def settle(self, lease: Lease, now_ms: int) -> None:
        """Remove the lease of a record that was settled."""
        self._release(lease)
        del self.leases[lease.place]
        self._held.count -= 1
        self.changed[lease.place] = None
        if not lease.message_group:
            return
        at = (lease.partition, lease.message_group)
        chain = self._chains[at]
        if chain[0] == lease.offset:
            chain.popleft()
        else:
            chain.remove(lease.offset)
        if not chain:
            del self._chains[at]
            return
        first = self.leases[lease.partition, chain[0]]
        if not first.token:
            heappush(self._ready, (now_ms, first.place))

    def extend(self, lease: Lease, until_ms: int) -> None:
        """Change the time until which a record is invisible. The earlier token is no longer valid."""
        lease.token = self._new_token()
        lease.until_ms = until_ms
        lease.holder = 0
        self._forget_attempt(lease)
        self.changed[lease.place] = lease
        heappush(self._due, (until_ms, lease.place))

    def of_attempt(self, attempt: int) -> list[Lease]:
        """Return the leases of this receive call, in offset order."""
        return [self.leases[place] for place in sorted(self._attempts.get(attempt, ()))]

    def renew(self, lease: Lease, until_ms: int) -> None:
        """Restart the time of a lease. Its token stays valid."""
        lease.until_ms = until_ms
        self.changed[lease.place] = lease
        heappush(self._due, (until_ms, lease.place))

    def release_all(self, holder: int, now_ms: int) -> None:
        """Make the records of a client ready that has ended."""
        for lease in [each for each in self.leases.values() if each.token and each.holder == holder]:
            self._free(lease, now_ms)

    def release(self, lease: Lease, now_ms: int) -> None:
        """Undo a delivery that did not reach its consumer. It does not count as an attempt."""
        if lease.token:
            lease.attempts -= 1
            self._free(lease, now_ms)
            self.changed[lease.place] = lease

    def _add(self, lease: Lease) -> None:
        self.leases[lease.place] = lease
        self._held.count += 1
        if lease.message_group:
            chain = self._chains.setdefault((lease.partition, lease.message_group), deque())
            chain.append(lease.offset)
            if len(chain) > 1 and chain[-2] > lease.offset:
                # The cursor was moved back.
                self._chains[lease.partition, lease.message_group] = deque(sorted(chain))

    def _is_first(self, lease: Lease) -> bool:
        return not lease.message_group or self._chains[lease.partition, lease.message_group][0] == lease.offset

    def _free(self, lease: Lease, since_ms: int) -> None:
        self._release(lease)
        if self._is_first(lease):
            heappush(self._ready, (since_ms, lease.place))

    def _release(self, lease: Lease) -> None:
        lease.token = 0
        self._forget_attempt(lease)

    def _forget_attempt(self, lease: Lease) -> None:
        if lease.attempt:
            others = self._attempts.get(lease.attempt)
            if others is not None:
                others.discard(lease.place)
                if not others:
                    del self._attempts[lease.attempt]
            lease.attempt = 0
