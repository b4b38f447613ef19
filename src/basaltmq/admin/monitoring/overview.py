"""Routes for the broker as a whole: overview, nodes, whoami."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Callable
from typing import Any, Final

from basaltmq import __version__
from basaltmq.admin.http.routes import Access, Call, Route, allowed
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.rates import Rates
from basaltmq.admin.monitoring.totals import Totals, TotalsCache
from basaltmq.broker.config.settings import Config
from basaltmq.broker.resources.memory_limit import memory_bytes, resident_bytes
from basaltmq.broker.routing.exchange import ExchangeType
from basaltmq.broker.scheduling.turns import in_turns

RABBITMQ_VERSION: Final = "3.13.7"
"""The RabbitMQ version whose management API Basalt follows. Its tools choose their requests by this version."""

ABSENT: Final = {
    "/api/global-parameters": "Global parameters: always empty.",
    "/api/extensions": "Extensions of the management console: always empty.",
}
"""Lists that RabbitMQ's tools request and that are always empty."""

EXCHANGE_TYPES: Final = tuple(ExchangeType)


class Overview:
    """Handlers of the overview routes."""

    def __init__(self, scope: Scope, totals: TotalsCache, config: Callable[[], Config], started_s: float) -> None:
        self._scope = scope
        self._totals = totals
        self._config = config
        self._started_s = started_s
        self._rates = Rates()

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/api/overview", self.overview, "Versions, listeners, and counts of all visible objects."),
            Route("GET", "/api/cluster-name", self.cluster_name, "The broker's name."),
            Route("GET", "/api/nodes", self.nodes, "List of nodes: memory, disk, files.", Access.MONITORING),
            Route("GET", "/api/nodes/{name}", self.one_node, "The node of this name.", Access.MONITORING),
            Route("GET", "/api/whoami", self.whoami, "Your user name and tags."),
            *(Route("GET", path, self.none, meaning) for path, meaning in ABSENT.items()),
        ]

    async def overview(self, call: Call) -> Any:
        totals = Totals()
        exchanges = 0
        connections = list(self._scope.connections)
        channels = sum(await in_turns(connections, _channels))
        seen = self._scope.listed(call)
        for vhost in seen:
            totals = totals.plus(await self._totals.of(vhost))
            exchanges += len(vhost.topology.exchanges)
        found: dict[str, Any] = {
            "management_version": RABBITMQ_VERSION,
            "rabbitmq_version": RABBITMQ_VERSION,
            "product_name": "Basalt",
            "product_version": __version__,
            "node": self._scope.node_name,
            "cluster_name": self._scope.node_name,
            "erlang_version": "",
            "rates_mode": "basic",
            "exchange_types": [{"name": kind, "enabled": True} for kind in EXCHANGE_TYPES],
            "object_totals": {
                "queues": totals.queues,
                "exchanges": exchanges,
                "consumers": totals.consumers,
                "connections": len(connections),
                "channels": channels,
            },
            "queue_totals": {
                "messages": totals.ready + totals.unacked,
                "messages_ready": totals.ready,
                "messages_unacknowledged": totals.unacked,
            },
            "message_stats": self._rates.stats(
                frozenset(vhost.name for vhost in seen),
                self,
                {
                    "publish": totals.published,
                    "deliver_get": totals.delivered,
                    "redeliver": totals.redelivered,
                    "ack": totals.acked,
                },
            ),
            "uptime_s": int(time.time() - self._started_s),
        }
        if allowed(call.who.tags, Access.MONITORING):
            found["listeners"] = [
                {"node": self._scope.node_name, "protocol": section, "port": port}
                for section, port in self._scope.ports.items()
            ]
            found["alarms"] = self._scope.alarms()
        return found

    def cluster_name(self, _call: Call) -> Any:
        return {"name": self._scope.node_name}

    def nodes(self, _call: Call) -> Any:
        return [self._node()]

    def one_node(self, call: Call) -> Any:
        self._scope.require_node(call.names["name"])
        return self._node()

    def _node(self) -> dict[str, Any]:
        config = self._config()
        usage = shutil.disk_usage(config.data_dir)
        memory = memory_bytes()
        return {
            "name": self._scope.node_name,
            "running": True,
            "type": "disc",
            "uptime": int((time.time() - self._started_s) * 1000),
            "mem_used": resident_bytes(),
            "mem_limit": config.memory.high_watermark.of(memory),
            "mem_alarm": any("memory" in alarm for alarm in self._scope.alarms()),
            "disk_free": usage.free,
            "disk_free_limit": config.disk.free_min.of(usage.total),
            "disk_free_alarm": any("disk" in alarm for alarm in self._scope.alarms()),
            "python_version": platform.python_version(),
            "data_dir": str(config.data_dir.absolute()),
        }

    def none(self, _call: Call) -> Any:
        return []

    def whoami(self, call: Call) -> Any:
        return {"name": call.who.name, "tags": sorted(call.who.tags)}


def _channels(connection: Any) -> int:
    return int(connection.info().get("channels", 0))
