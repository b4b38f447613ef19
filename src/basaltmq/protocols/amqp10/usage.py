"""The resources that a connection uses: links, bytes of incomplete deliveries, and a cache of valid properties."""

from __future__ import annotations

from typing import Final

from basaltmq.protocols.amqp10.wire.errors import RESOURCE_LIMIT, Fault

PARTIAL_BYTES_MAX: Final = 128 << 20
"""Incomplete deliveries of a connection: two of the largest size."""

CHECKED_MAX: Final = 256
CHECKED_BYTES_MAX: Final = 256
"""Limits of the cache of valid properties. Properties with unique ids never hit it."""


class Usage:
    """The resources of one connection."""

    __slots__ = ("_checked", "_links", "_links_max", "_partial_bytes")

    def __init__(self, links_max: int) -> None:
        self._links_max = links_max
        self._links = self._partial_bytes = 0
        self._checked: set[bytes] = set()

    def count_link(self) -> None:
        """Count a link that attaches."""
        if self._links >= self._links_max:
            raise Fault(RESOURCE_LIMIT, f"the limit of {self._links_max} links per connection is reached")
        self._links += 1

    def link_ended(self) -> None:
        self._links -= 1

    def count_partial(self, size: int) -> None:
        """Count bytes of incomplete deliveries."""
        self._partial_bytes += size
        if self._partial_bytes > PARTIAL_BYTES_MAX:
            raise Fault(RESOURCE_LIMIT, f"incomplete deliveries exceed {PARTIAL_BYTES_MAX} bytes")

    def is_checked(self, raw: bytes) -> bool:
        """Whether the properties of a message are known to be valid."""
        return raw in self._checked

    def remember_checked(self, raw: bytes) -> None:
        """Remember valid properties of a message."""
        if len(raw) <= CHECKED_BYTES_MAX:
            if len(self._checked) >= CHECKED_MAX:
                self._checked.clear()
            self._checked.add(raw)
