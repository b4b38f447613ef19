"""Export and import of definitions: all configured objects of a broker, without messages.

An import follows the order of dependencies: virtual hosts, users, permissions, exchanges, queues, bindings, policies,
MQTT rules. Queues of MQTT sessions and rules are not exported, because the broker creates them.

An import does not change existing objects. The response lists objects that exist with other settings, and invalid
entries. They do not prevent the import of other entries.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from basaltmq import __version__
from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.overview import RABBITMQ_VERSION
from basaltmq.admin.objects.bindings import shown_binding
from basaltmq.admin.objects.definitions_file import (
    Definitions,
    PolicyEntry,
    VhostEntry,
    policy_entry,
    queue_arguments,
    vhost_of,
)
from basaltmq.admin.objects.exchanges import shown_exchange
from basaltmq.admin.objects.json_tables import shown_table, table_of
from basaltmq.admin.objects.limits import COMPONENT, exported
from basaltmq.admin.objects.mqtt import MqttState
from basaltmq.admin.objects.policies import shown_policy
from basaltmq.admin.objects.principals import Principals
from basaltmq.broker.consumers.queue import BrokerQueue
from basaltmq.broker.routing.policy import Policy
from basaltmq.broker.routing.topology import PREDECLARED
from basaltmq.broker.scheduling.turns import Turns, in_turns
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.kinds import Kind
from basaltmq.errors import BasaltError

SKIPPED_MAX: Final = 1_000
"""Limit for the list of skipped entries."""

FIXED: Final = {"", *(name for name, _ in PREDECLARED)}
DERIVED: Final = ("mqtt.session.", "mqtt.share.", "mqtt.rule.")
"""Prefixes of queues that MQTT creates for its sessions, shared subscriptions and rules."""

OPERATOR_POLICY: Final = "operator_policy"

Entry = TypeVar("Entry")


class DefinitionTransfer:
    """Handlers of /api/definitions."""

    def __init__(self, scope: Scope, principals: Principals, mqtt: Callable[[], MqttState | None]) -> None:
        self._scope = scope
        self._mqtt = mqtt
        self._principals = principals

    def routes(self) -> list[Route]:
        size = self._scope.body_bytes_max
        returns = "The number of imported entries by kind, and one line for each skipped entry."
        one = "/api/definitions/{vhost}"
        return [
            Route("GET", "/api/definitions", self.export, "Export the definitions of the broker.",
                  Access.ADMINISTRATOR),
            Route("POST", "/api/definitions", self.import_all, "Import definitions, also those of RabbitMQ.",
                  Access.ADMINISTRATOR, takes=Definitions, body_bytes_max=size, returns=returns),
            Route("GET", one, self.export_vhost, "Export the definitions of a virtual host.", Access.ADMINISTRATOR),
            Route("POST", one, self.import_into_vhost, "Import definitions into a virtual host.",
                  Access.ADMINISTRATOR, takes=Definitions, body_bytes_max=size, returns=returns),
        ]  # fmt: skip

    async def export(self, call: Call) -> Any:
        found: dict[str, Any] = {
            **_head(),
            "users": self._principals.exported_users(),
            "vhosts": [
                {"name": name, "description": self._scope.description(name)} for name in self._scope.vhost_states()
            ],
            "permissions": self._principals.exported_permissions(),
            "topic_permissions": self._principals.exported_topic_permissions(),
        }
        for vhost in self._scope.listed(call):
            for kind, entries in (await self._exported(vhost)).items():
                found.setdefault(kind, []).extend(entries)
        return found

    async def export_vhost(self, call: Call) -> Any:
        found = await self._exported(self._scope.vhost(call))
        for entries in found.values():
            for entry in entries:
                entry.pop("vhost", None)
        return {**_head(), **found}

    async def _exported(self, vhost: VHost) -> dict[str, list[dict[str, Any]]]:
        found, mqtt = await _exported(vhost), self._mqtt()
        found["parameters"] += exported(vhost.name, self._scope.node.limits.of(Kind.VHOST, vhost.name))
        if mqtt is not None:
            wanted = ("name", "vhost", "filter", "topic", "key")
            found["mqtt_rules"] = [{name: each[name] for name in wanted} for each in mqtt.rules(vhost.name)]
        return found

    async def import_all(self, call: Call) -> Any:
        return await self.import_definitions(call.body)

    async def import_definitions(self, definitions: Definitions) -> dict[str, Any]:
        """Import definitions. Return the counts of imported entries and the skipped ones."""
        importing = _Import()
        await importing.add_all("vhosts", definitions.vhosts, lambda each: f"vhost {each.name!r}", self._import_vhost)
        principals = self._principals
        await importing.add_all("users", definitions.users, lambda each: f"user {each.name!r}", principals.import_user)
        await importing.add_all(
            "permissions",
            definitions.permissions,
            lambda each: f"permission of {each.user!r} in {each.vhost!r}",
            principals.import_permission,
        )
        await importing.add_all(
            "topic_permissions",
            definitions.topic_permissions,
            lambda each: f"topic permission of {each.user!r} in {each.vhost!r}",
            principals.import_topic_permission,
        )
        return await self._import_topology(importing, definitions, None)

    async def _import_vhost(self, entry: VhostEntry) -> None:
        await self._scope.ensure_vhost(entry.name, entry.text())

    async def import_into_vhost(self, call: Call) -> Any:
        definitions: Definitions = call.body
        for kind in ("users", "vhosts", "permissions", "topic_permissions"):
            if getattr(definitions, kind):
                raise HttpError(400, f"{kind} belong to the whole broker; import this file without a vhost")
        return await self._import_topology(_Import(), definitions, self._scope.vhost(call).name)

    async def _import_topology(self, importing: _Import, definitions: Definitions, only: str | None) -> dict[str, Any]:
        def at(entry: Any) -> VHost:
            return self._scope.named(vhost_of(entry, only))

        def declare_exchange(entry: Any) -> None:
            if entry.name not in FIXED:
                at(entry).declare_exchange(
                    entry.name,
                    entry.type,
                    durable=entry.durable,
                    auto_delete=entry.auto_delete,
                    internal=entry.internal,
                    arguments=table_of(entry.arguments),
                )

        def declare_queue(entry: Any) -> None:
            at(entry).declare_queue(
                entry.name,
                durable=entry.durable,
                auto_delete=entry.auto_delete,
                arguments=table_of(queue_arguments(entry)),
            )

        def bind(entry: Any) -> None:
            vhost, arguments = at(entry), table_of(entry.arguments)
            if entry.destination_type == "queue":
                vhost.bind_queue(entry.destination, entry.source, entry.routing_key, arguments)
            elif entry.destination_type == "exchange":
                vhost.bind_exchange(entry.destination, entry.source, entry.routing_key, arguments)
            else:
                raise HttpError(400, f"destination_type must be queue or exchange, not {entry.destination_type!r}")

        def set_policy(entry: Any) -> None:
            at(entry).policies.set(_policy(entry))

        def set_operator_policy(entry: Any) -> None:
            at(entry).policies.set(_policy(entry), operators=True)

        async def set_limits(entry: Any) -> None:
            if not isinstance(entry.value, dict) or not all(type(each) is int for each in entry.value.values()):
                raise HttpError(400, f"the value must be an object of whole numbers, not {entry.value!r:.80}")
            for limit, value in entry.value.items():
                await self._scope.node.limits.set(Kind.VHOST, at(entry).name, limit, value)

        async def set_rule(entry: Any) -> None:
            mqtt = self._mqtt()
            if mqtt is None:
                raise HttpError(404, "there is no MQTT listener; set mqtt.enabled = true")
            await mqtt.set_rule(at(entry).name, entry.name, entry.filter, entry.topic, entry.key)

        await importing.add_all(
            "exchanges", definitions.exchanges, lambda each: f"exchange {each.name!r}", declare_exchange
        )
        await importing.add_all("queues", definitions.queues, lambda each: f"queue {each.name!r}", declare_queue)
        bindings = [each for each in definitions.bindings if each.source]
        await importing.add_all(
            "bindings", bindings, lambda each: f"binding {each.source!r} to {each.destination!r}", bind
        )
        await importing.add_all("policies", definitions.policies, lambda each: f"policy {each.name!r}", set_policy)
        limits: list[PolicyEntry] = []
        for parameter in definitions.parameters:
            if parameter.component == COMPONENT:
                await importing.add_all("vhost_limits", [parameter], lambda _: "limits of a vhost", set_limits)
                continue
            if parameter.component != OPERATOR_POLICY or not isinstance(parameter.value, dict):
                importing.skip(f"parameter {parameter.name!r} of {parameter.component}: Basalt has no such component")
                continue
            given = {**parameter.value, "name": parameter.name, "vhost": parameter.vhost}
            try:
                limits.append(policy_entry(given))
            except msgspec.ValidationError as error:
                importing.skip(f"operator policy {parameter.name!r}: {error}")
        await importing.add_all(
            "operator_policies", limits, lambda each: f"operator policy {each.name!r}", set_operator_policy
        )
        await importing.add_all("mqtt_rules", definitions.mqtt_rules, lambda each: f"MQTT rule {each.name!r}", set_rule)
        return {"imported": importing.imported, "skipped": importing.skipped}


class _Import:
    """The counts and skipped entries of a running import."""

    def __init__(self) -> None:
        self.imported: dict[str, int] = {}
        self.skipped: list[str] = []
        self._turns = Turns()

    async def add_all(
        self, kind: str, entries: Iterable[Entry], named: Callable[[Entry], str], take: Callable[[Entry], Any]
    ) -> None:
        for entry in entries:
            try:
                made = take(entry)
                if inspect.isawaitable(made):
                    await made
            except (BasaltError, HttpError) as error:
                self.skip(f"{named(entry)}: {error}")
            else:
                self.imported[kind] = self.imported.get(kind, 0) + 1
            await self._turns.yield_if_due()

    def skip(self, line: str) -> None:
        if len(self.skipped) < SKIPPED_MAX:
            self.skipped.append(line)


def _policy(entry: PolicyEntry) -> Policy:
    return Policy(entry.name, entry.pattern, entry.definition, entry.priority, entry.apply_to)


def _head() -> dict[str, Any]:
    return {"rabbitmq_version": RABBITMQ_VERSION, "product_name": "Basalt", "product_version": __version__}


def _queue_entry(vhost: VHost, queue: BrokerQueue) -> dict[str, Any]:
    return {
        "name": queue.name,
        "vhost": vhost.name,
        "durable": True,
        "auto_delete": queue.declared.auto_delete,
        "arguments": shown_table(queue.declared.arguments),
    }


def _without(entry: dict[str, Any], field: str) -> dict[str, Any]:
    del entry[field]
    return entry


async def _exported(vhost: VHost) -> dict[str, list[dict[str, Any]]]:
    """Return the durable objects of a virtual host. Clients declare the others again after a restart."""
    queues = await in_turns(
        [each for each in vhost.queues if each.declared.survives and not each.name.startswith(DERIVED)],
        partial(_queue_entry, vhost),
    )
    kept = [each for each in vhost.topology.exchanges.values() if each.durable and each.name not in FIXED]
    exchanges = await in_turns(kept, lambda each: _without(shown_exchange(vhost, each), "policy"))
    durable = [
        each for each in vhost.topology.bindings() if each.durable and not each.destination.name.startswith(DERIVED)
    ]
    bindings = await in_turns(durable, lambda each: _without(shown_binding(vhost.name, each), "properties_key"))
    parameters = [
        {
            "vhost": vhost.name,
            "component": OPERATOR_POLICY,
            "name": policy.name,
            "value": {
                "pattern": policy.pattern,
                "definition": policy.definition,
                "priority": policy.priority,
                "apply-to": policy.apply_to,
            },
        }
        for policy in vhost.policies.list(operators=True)
    ]
    return {
        "queues": queues,
        "exchanges": exchanges,
        "bindings": bindings,
        "policies": [shown_policy(vhost.name, policy) for policy in vhost.policies.list()],
        "parameters": parameters,
    }
