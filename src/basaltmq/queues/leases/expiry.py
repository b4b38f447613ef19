"""Leases of all queues by expiry time: a heap in memory, filled page by page from the expiry index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Final

from basaltmq.errors import CorruptionError
from basaltmq.queues.entries.quarantine import Suspects
from basaltmq.queues.leases.table import FOREVER, LeaseCall, Tokens
from basaltmq.store.api import Store
from basaltmq.store.families import Family
from basaltmq.store.keys.queues import decode_lease_expiry_key, lease_expiry_bound

HEAP_SLACK: Final = 1024
"""Settled leases that the heap may hold beyond the number of live leases."""

EXPIRY_PAGE: Final = 1024
"""Leases of earlier boots read at a time."""


class LeaseExpiry:
    """The leases of all queues by expiry time."""

    def __init__(self, store: Store, tokens: Tokens, suspects: Suspects) -> None:
        self._store = store
        self._suspects = suspects
        self._tokens = tokens
        self._heap: list[tuple[int, str, int]] = []
        self._expires: dict[int, int] = {}
        self._pages_from: bytes | None = b""
        self._read_page()
        self._expire_unbounded()

    def add(self, expires_ns: int, queue: str, token: int) -> None:
        """Add a lease, or change its expiry."""
        if expires_ns == FOREVER:
            self._expires.pop(token, None)
            return
        self._expires[token] = expires_ns
        heappush(self._heap, (expires_ns, queue, token))
        if len(self._heap) > 2 * len(self._expires) + HEAP_SLACK:
            self._heap = [each for each in self._heap if self._expires.get(each[2]) == each[0]]
            heapify(self._heap)

    def expect(self, call: LeaseCall, queue: str) -> None:
        """Add a lease that was loaded with its queue, because its row in the expiry index may be lost."""
        if not call.is_consumer_bound and self._expires.get(call.token) != call.expires_ns:
            self.add(call.expires_ns, queue, call.token)

    def remove(self, token: int) -> None:
        """Remove a settled lease. Its heap item is dropped when it reaches the top, or when the heap has too many
        settled items."""
        self._expires.pop(token, None)

    def due(self, now_ns: int, count_max: int) -> list[tuple[int, str, int]]:
        """Remove and return up to `count_max` due leases (expiry, queue, token), earliest first."""
        found: list[tuple[int, str, int]] = []
        while len(found) < count_max:
            deadline = self.deadline_ns()
            if deadline is None or deadline > now_ns:
                break
            if self._heap and self._heap[0][0] == deadline:
                found.append(heappop(self._heap))
                self._expires.pop(found[-1][2])
            else:
                self._read_page()
        return found

    def deadline_ns(self) -> int | None:
        """Return the expiry of the first known lease, or of the next page to read, whichever is earlier."""
        heap, expires = self._heap, self._expires
        while heap and expires.get(heap[0][2]) != heap[0][0]:
            heappop(heap)
        first = heap[0][0] if heap else None
        if self._pages_from:
            page = int.from_bytes(self._pages_from[:8], "big")
            return page if first is None else min(first, page)
        return first

    def _read_page(self) -> None:
        """Add the next page of leases of earlier boots."""
        assert self._pages_from is not None
        rows = self._store.scan(Family.LEASE_EXPIRY, self._pages_from, lease_expiry_bound(FOREVER))
        keys = [key for key, _ in islice(rows, EXPIRY_PAGE + 1)]
        for expires_ns, queue, token in self._from_earlier_boots(keys[:EXPIRY_PAGE]):
            self.add(expires_ns, queue, token)
        self._pages_from = keys[EXPIRY_PAGE] if len(keys) > EXPIRY_PAGE else None

    def _expire_unbounded(self) -> None:
        """Expire consumer-bound leases at once. Earlier versions wrote rows for them, and their consumers are gone."""
        rows = self._store.scan(Family.LEASE_EXPIRY, lease_expiry_bound(FOREVER))
        for _, queue, token in self._from_earlier_boots(key for key, _ in rows):
            self.add(0, queue, token)

    def _from_earlier_boots(self, keys: Iterable[bytes]) -> Iterator[tuple[int, str, int]]:
        for key in keys:
            try:
                expires_ns, queue, token = decode_lease_expiry_key(key)
            except CorruptionError as error:
                self._suspects.note(Family.LEASE_EXPIRY, key, b"", str(error))
                continue
            if not self._tokens.is_of_this_boot(token):
                yield expires_ns, queue, token
