"""Worker sessions: leases that are released when their worker disconnects.

A unary call does not show whether its caller is still alive. A worker that wants its leases released as soon as it dies
keeps an OpenSession call open and passes the session number to Lease. When the OpenSession call ends, the messages
leased under the session return to their places. The attempt count does not change.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError, PreconditionFailedError
from basaltmq.queues.plane import QueuePlane

SWEEP_MIN: Final = 1_024
"""Leases of one session before expired ones are swept."""


class _Lease:
    """Remaining messages of a lease, and its deadline."""

    __slots__ = ("count", "expires_ns")

    def __init__(self, count: int, expires_ns: int) -> None:
        self.count = count
        self.expires_ns = expires_ns


class WorkerSession:
    """One session and its leases."""

    __slots__ = ("leases", "number", "peer", "sweep_at")

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.leases: dict[tuple[str, int], _Lease] = {}
        """Leases by queue and token."""
        self.sweep_at = SWEEP_MIN


class WorkerSessions:
    """All open sessions."""

    def __init__(self, plane: QueuePlane, first: int) -> None:
        """Session numbers start after `first`, which must differ between boots so that old numbers are invalid."""
        self._plane = plane
        self._last = first
        self._present: dict[int, WorkerSession] = {}
        self._by_lease: dict[tuple[str, int], WorkerSession] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, number: int) -> bool:
        return number in self._present

    def begin(self, peer: str) -> WorkerSession:
        self._last += 1
        session = self._present[self._last] = WorkerSession(self._last, peer)
        return session

    def end(self, session: WorkerSession) -> None:
        """Close a session and release its leases."""
        del self._present[session.number]
        for lease in session.leases:
            del self._by_lease[lease]
            # The lease may be released already, or its queue deleted. If the store is stalled, the lease expires later.
            with suppress(BasaltError):
                self._plane.release(*lease)

    def require(self, number: int, peer: str) -> WorkerSession:
        """Return the caller's session. Only the connection that opened a session may lease under it."""
        found = self._present.get(number)
        if found is None or found.peer != peer:
            raise PreconditionFailedError(f"this connection has no session {number}; call OpenSession first")
        return found

    def leased(self, session: WorkerSession, queue: str, token: int, count: int, expires_ns: int) -> None:
        """Record a lease of `count` messages."""
        session.leases[queue, token] = _Lease(count, expires_ns)
        self._by_lease[queue, token] = session

    def sweep(self, session: WorkerSession, now_ns: int) -> None:
        """Forget expired leases if there are many. Their messages are back in the queue."""
        if len(session.leases) < session.sweep_at:
            return
        for place in [place for place, lease in session.leases.items() if lease.expires_ns <= now_ns]:
            self.over(*place)
        session.sweep_at = max(SWEEP_MIN, 2 * len(session.leases))

    def extended(self, queue: str, token: int, part: int, count: int | None, expires_ns: int) -> None:
        """Record an extension. If only `count` messages were extended, they form a new lease with the token `part`."""
        session = self._by_lease.get((queue, token))
        if session is None:
            return
        if part == token:
            session.leases[queue, token].expires_ns = expires_ns
        elif count is not None:
            self.leased(session, queue, part, count, expires_ns)
            self.settled(queue, token, count)

    def settled(self, queue: str, token: int, count: int) -> None:
        """Record that `count` messages of a lease were settled."""
        session = self._by_lease.get((queue, token))
        if session is not None:
            lease = session.leases[queue, token]
            lease.count -= count
            if lease.count <= 0:
                self.over(queue, token)

    def over(self, queue: str, token: int) -> None:
        """Forget a lease."""
        session = self._by_lease.pop((queue, token), None)
        if session is not None:
            del session.leases[queue, token]
