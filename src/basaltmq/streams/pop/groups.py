"""Subscription groups: the settings of groups that receive records under leases, as configured objects (SPEC D1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import NewObject
from basaltmq.catalog.record import ROOT
from basaltmq.decoding import converter
from basaltmq.errors import AlreadyExistsError, CorruptionError, GroupNotFoundError, InvalidConfigError

ATTEMPTS_MAX: Final = 1_000
BACKOFF_STEPS_MAX: Final = 100
BACKOFF_S_MAX: Final = 7_200


class GroupConfig(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Settings of a subscription group."""

    ordered: bool = False
    """Consumers process the records of a message group one after the other, so several may be delivered together."""
    max_attempts: int = 17
    """Deliveries of a record, the first included. After them it goes to the dead-letter topic."""
    backoff_s: tuple[int, ...] = (1, 5, 10, 30, *range(60, 601, 60), 1_200, 1_800, 3_600, 7_200)
    """Delays that consumers use for the second and later deliveries, in seconds."""

    def check(self) -> None:
        if not 1 <= self.max_attempts <= ATTEMPTS_MAX:
            raise InvalidConfigError(f"max_attempts must be 1 to {ATTEMPTS_MAX}, not {self.max_attempts}")
        if not 1 <= len(self.backoff_s) <= BACKOFF_STEPS_MAX:
            raise InvalidConfigError(f"backoff_s needs 1 to {BACKOFF_STEPS_MAX} delays, not {len(self.backoff_s)}")
        if not all(1 <= each <= BACKOFF_S_MAX for each in self.backoff_s):
            raise InvalidConfigError(f"the delays of backoff_s must be 1 to {BACKOFF_S_MAX} seconds")


group_config: Final = converter(GroupConfig)


class SubscriptionGroups:
    """The subscription groups of a virtual host."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def find(self, name: str) -> GroupConfig | None:
        found = self._catalog.find(Kind.SUBSCRIPTION_GROUP, name, ROOT)
        if found is None:
            return None
        try:
            return group_config(found.attributes)
        except msgspec.ValidationError as error:
            raise CorruptionError(f"the settings of subscription group {name!r} cannot be decoded: {error}") from error

    def get(self, name: str) -> GroupConfig:
        found = self.find(name)
        if found is None:
            raise GroupNotFoundError(f"subscription group {name!r} does not exist; create it first")
        return found

    def page(self, start_after: str | None, limit: int) -> list[tuple[str, GroupConfig]]:
        """Return groups by name, after a name."""
        found = self._catalog.page(Kind.SUBSCRIPTION_GROUP, ROOT, start_after=start_after, limit=limit).objects
        return [(each.name, group_config(each.attributes)) for each in found]

    def set(self, name: str, config: GroupConfig) -> bool:
        """Create a group or change its settings. Durable on return. Return whether it is new."""
        found = self._catalog.find(Kind.SUBSCRIPTION_GROUP, name, ROOT)
        if found is None:
            self.create(name, config)
            return True
        config.check()
        self._catalog.update(found.id, _attributes(config))
        return False

    def delete(self, name: str) -> None:
        """Delete the settings of a group. Its offsets and leases stay, as those of any group."""
        found = self._catalog.find(Kind.SUBSCRIPTION_GROUP, name, ROOT)
        if found is None:
            raise GroupNotFoundError(f"subscription group {name!r} does not exist")
        self._catalog.delete(found.id)

    def create(self, name: str, config: GroupConfig) -> None:
        """Create a group. Durable on return."""
        config.check()
        self._catalog.create(Kind.SUBSCRIPTION_GROUP, name, ROOT, _attributes(config))

    def ensure(self, groups: Mapping[str, GroupConfig]) -> None:
        """Create those of the groups that do not exist, in one batch. Durable on return."""
        missing = {name: config for name, config in groups.items() if self.find(name) is None}
        new = []
        for name, config in missing.items():
            config.check()
            new.append(NewObject(Kind.SUBSCRIPTION_GROUP, name, ROOT, _attributes(config)))
        try:
            self._catalog.create_many(new)
        except AlreadyExistsError:
            # An operator created one of them meanwhile.
            self.ensure(missing)


def _attributes(config: GroupConfig) -> dict[str, Any]:
    built: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(config))
    return built
