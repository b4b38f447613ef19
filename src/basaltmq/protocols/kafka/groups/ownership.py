"""Partition ownership in a KIP-848 consumer group, as the coordinator knows it.

A member owns a partition from the response that assigns it until the member confirms the revocation or is removed.
Invariant: a partition has at most one owner. A conflicting `take` is a bug and raises AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterable

from basaltmq.protocols.kafka.groups.assignors import PartitionId


class Ownership:
    """The owned partitions of one group."""

    def __init__(self) -> None:
        self._owners: dict[PartitionId, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, partition_id: PartitionId) -> str | None:
        return self._owners.get(partition_id)

    def free(self, partition_ids: Iterable[PartitionId]) -> frozenset[PartitionId]:
        """Return the partitions without an owner."""
        owners = self._owners
        return frozenset(partition_id for partition_id in partition_ids if partition_id not in owners)

    def take(self, member: str, partition_ids: Iterable[PartitionId]) -> None:
        for partition_id in partition_ids:
            owner = self._owners.get(partition_id)
            assert owner is None, (
                f"partition {partition_id[1]} of {partition_id[0].hex()} is owned by {owner}, not free for {member}"
            )
            self._owners[partition_id] = member

    def release(self, member: str, partition_ids: Iterable[PartitionId]) -> None:
        for partition_id in partition_ids:
            owner = self._owners.pop(partition_id)
            assert owner == member, (
                f"partition {partition_id[1]} of {partition_id[0].hex()} is owned by {owner}, not by {member}"
            )
