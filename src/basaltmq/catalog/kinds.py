"""The kinds of objects in the catalog, and the parent that each kind may have.

    (top) ┬ vhost ┬ topic
          │       └ subscription group
          └ user ─ permission

The store of a single vhost has its topics and subscription groups at the top. Objects of other kinds are kept, but not
shown.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final


class Kind(enum.StrEnum):
    """The kind of an object. The value is stored as its type and must not change."""

    VHOST = "vhost"
    USER = "user"
    PERMISSION = "permission"
    TOPIC = "topic"
    SUBSCRIPTION_GROUP = "subscription_group"


PARENTS: Final[Mapping[Kind, tuple[Kind, ...]]] = MappingProxyType(
    {
        Kind.VHOST: (),
        Kind.USER: (),
        Kind.PERMISSION: (Kind.USER,),
        Kind.TOPIC: (Kind.VHOST,),
        Kind.SUBSCRIPTION_GROUP: (Kind.VHOST,),
    }
)
"""The kinds that the parent of each kind may have."""

NEVER_AT_TOP: Final = frozenset({Kind.PERMISSION})

BY_LABEL: Final[Mapping[str, Kind]] = MappingProxyType({kind.value: kind for kind in Kind})
