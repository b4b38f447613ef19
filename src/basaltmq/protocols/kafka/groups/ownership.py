"""Which member of a consumer group holds which partition, as far as the coordinator knows.

A partition is held from the moment a member is told that it is its own until the member says that it let go, or is no
member any more. Invariant: nobody takes what another holds; a take that would is our bug, and raises.
"""

from __future__ import annotations

from collections.abc import Iterable

from basaltmq.protocols.kafka.groups.assignors import Place


class Ownership:
    """The partitions of one group."""

    def __init__(self) -> None:
        self._holders: dict[Place, str] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def holder(self, place: Place) -> str | None:
        return self._holders.get(place)

    def free(self, places: Iterable[Place]) -> frozenset[Place]:
        """Those of them that nobody holds."""
        holders = self._holders
        return frozenset(place for place in places if place not in holders)

    def take(self, member: str, places: Iterable[Place]) -> None:
        for place in places:
            holder = self._holders.get(place)
            assert holder is None, f"partition {place[1]} of {place[0].hex()} is {holder}'s; {member} may not take it"
            self._holders[place] = member

    def release(self, member: str, places: Iterable[Place]) -> None:
        for place in places:
            holder = self._holders.pop(place)
            assert holder == member, f"partition {place[1]} of {place[0].hex()} is {holder}'s, not {member}'s"
