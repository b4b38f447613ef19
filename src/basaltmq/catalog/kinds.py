"""The kinds of objects in the catalog, and which kinds each may stand under.

    (top) ┬ vhost ┬ queue
          │       ├ exchange ─ binding
          │       ├ topic ─ subscription
          │       ├ group ─ subscription
          │       ├ policy
          │       └ parameter
          └ user ─ permission

In a store that belongs to one vhost, what stands under a vhost may stand at the top.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class Kind(enum.StrEnum):
    """What an object is. The value is its type on disk and must not change."""

    VHOST = "vhost"
    USER = "user"
    PERMISSION = "permission"
    QUEUE = "queue"
    EXCHANGE = "exchange"
    BINDING = "binding"
    TOPIC = "topic"
    GROUP = "group"
    SUBSCRIPTION = "subscription"
    POLICY = "policy"
    PARAMETER = "parameter"


PARENTS: Final[Mapping[Kind, tuple[Kind, ...]]] = MappingProxyType(
    {
        Kind.VHOST: (),
        Kind.USER: (),
        Kind.PERMISSION: (Kind.USER,),
        Kind.QUEUE: (Kind.VHOST,),
        Kind.EXCHANGE: (Kind.VHOST,),
        Kind.BINDING: (Kind.EXCHANGE,),
        Kind.TOPIC: (Kind.VHOST,),
        Kind.GROUP: (Kind.VHOST,),
        Kind.SUBSCRIPTION: (Kind.TOPIC, Kind.GROUP),
        Kind.POLICY: (Kind.VHOST,),
        Kind.PARAMETER: (Kind.VHOST,),
    }
)
"""The kinds an object of each kind may have as its parent."""

NEVER_AT_TOP: Final = frozenset({Kind.PERMISSION, Kind.BINDING, Kind.SUBSCRIPTION})

BY_LABEL: Final[Mapping[str, Kind]] = MappingProxyType({kind.value: kind for kind in Kind})
