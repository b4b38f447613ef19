"""Attendances: leases that end with the presence of who took them.

A unary call says nothing about whether its caller lives on. A consumer that wants its leases back in the queue the
moment it dies keeps an Attend call open and names its number in Lease. When the call ends, what is leased under it goes
back to its place; no attempt is counted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from basaltmq.errors import BasaltError, PreconditionFailedError
from basaltmq.queues.plane import QueuePlane

SWEEP_MIN: Final = 1_024
"""Leases of one attendance before those that ran out are looked for."""


class _Lease:
    """What is left of a lease, and until when."""

    __slots__ = ("count", "expires_ns")

    def __init__(self, count: int, expires_ns: int) -> None:
        self.count = count
        self.expires_ns = expires_ns


class Attendance:
    """Who is there, and what they lease."""

    __slots__ = ("leases", "number", "peer", "sweep_at")

    def __init__(self, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.leases: dict[tuple[str, int], _Lease] = {}
        """By queue and token."""
        self.sweep_at = SWEEP_MIN


class Attendances:
    """Everyone who is there."""

    def __init__(self, plane: QueuePlane, first: int) -> None:
        """Numbers grow from `first`; one that differs from boot to boot keeps those of an earlier one out."""
        self._plane = plane
        self._last = first
        self._present: dict[int, Attendance] = {}
        self._by_lease: dict[tuple[str, int], Attendance] = {}

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, number: int) -> bool:
        return number in self._present

    def begin(self, peer: str) -> Attendance:
        self._last += 1
        attendance = self._present[self._last] = Attendance(self._last, peer)
        return attendance

    def end(self, attendance: Attendance) -> None:
        """Give back what is leased under it."""
        del self._present[attendance.number]
        for lease in attendance.leases:
            del self._by_lease[lease]
            # Given back already, or gone with its queue. What a store that is behind refuses comes back with its time.
            with suppress(BasaltError):
                self._plane.release(*lease)

    def require(self, number: int, peer: str) -> Attendance:
        """The attendance of a caller. Only its own connection may lease under it."""
        found = self._present.get(number)
        if found is None or found.peer != peer:
            raise PreconditionFailedError(f"nobody of this connection attends as number {number}; call Attend first")
        return found

    def leased(self, attendance: Attendance, queue: str, token: int, count: int, expires_ns: int) -> None:
        """Messages were leased, `count` of them."""
        attendance.leases[queue, token] = _Lease(count, expires_ns)
        self._by_lease[queue, token] = attendance

    def sweep(self, attendance: Attendance, now_ns: int) -> None:
        """Forget leases that ran out, if there are many; the queue has their messages."""
        if len(attendance.leases) < attendance.sweep_at:
            return
        for place in [place for place, lease in attendance.leases.items() if lease.expires_ns <= now_ns]:
            self.over(*place)
        attendance.sweep_at = max(SWEEP_MIN, 2 * len(attendance.leases))

    def extended(self, queue: str, token: int, part: int, count: int | None, expires_ns: int) -> None:
        """A lease lasts longer; `count` messages of it have the token `part`, all of them if it is the same."""
        attendance = self._by_lease.get((queue, token))
        if attendance is None:
            return
        if part == token:
            attendance.leases[queue, token].expires_ns = expires_ns
        elif count is not None:
            self.leased(attendance, queue, part, count, expires_ns)
            self.settled(queue, token, count)

    def settled(self, queue: str, token: int, count: int) -> None:
        """So many messages of a lease are answered for."""
        attendance = self._by_lease.get((queue, token))
        if attendance is not None:
            lease = attendance.leases[queue, token]
            lease.count -= count
            if lease.count <= 0:
                self.over(queue, token)

    def over(self, queue: str, token: int) -> None:
        """Nothing is left of a lease."""
        attendance = self._by_lease.pop((queue, token), None)
        if attendance is not None:
            del attendance.leases[queue, token]
