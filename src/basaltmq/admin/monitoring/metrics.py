"""Prometheus metrics: per virtual host at /metrics, per queue and connection at /metrics/per-object.

The number of series at /metrics grows only with the number of virtual hosts. Per-object metrics are built on request
and stop at a limit, so that monitoring cannot overload a broker with a million queues. `basalt_objects_left_out` counts
the queues beyond the limit. Per-object metrics contain queue names and client addresses, so they require the tag
`monitoring`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Final

from basaltmq import __version__
from basaltmq.admin.http.auth import Authenticator
from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Access, Call, Route, allowed
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.exposition import CONTENT_TYPE, Metric, expose
from basaltmq.admin.monitoring.totals import Totals, TotalsCache
from basaltmq.broker.resources.memory_limit import resident_bytes
from basaltmq.broker.scheduling.turns import Turns
from basaltmq.broker.vhost import VHost
from basaltmq.store.rocks import RocksStore

OBJECTS_MAX: Final = 20_000
"""Limit for queues and for connections shown individually: about 20 MB of text, near the limit of Prometheus."""

_TOTALS: Final = (
    ("queues", "gauge", "Queues."),
    ("consumers", "gauge", "Consumers."),
    ("queue_messages_ready", "gauge", "Messages ready to be delivered."),
    ("queue_messages_unacked", "gauge", "Messages delivered and not acknowledged."),
    ("queue_messages_bytes", "gauge", "Bytes of messages in queues."),
    ("messages_published_total", "counter", "Messages enqueued since the broker started."),
    ("messages_delivered_total", "counter", "Messages delivered since the broker started."),
    ("messages_redelivered_total", "counter", "Messages redelivered since the broker started."),
    ("messages_acked_total", "counter", "Messages acknowledged since the broker started."),
    ("messages_expired_total", "counter", "Messages expired."),
    ("messages_dead_lettered_total", "counter", "Messages dead-lettered."),
    ("messages_dropped_total", "counter", "Messages dropped by a length limit."),
    ("queue_rows_quarantined", "gauge", "Damaged rows of queues in quarantine."),
    ("queues_down", "gauge", "Queues that failed and need a restart."),
)
"""In the order of the fields of `Totals`."""


class Metrics:
    """Handlers of the metrics routes."""

    def __init__(
        self,
        scope: Scope,
        totals: TotalsCache,
        authenticator: Authenticator,
        *,
        is_public: Callable[[], bool],
        started_s: float,
        mqtt: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """`mqtt` returns the counters of the MQTT listeners by name, or none."""
        self._scope = scope
        self._authenticator = authenticator
        self._totals = totals
        self._is_public = is_public
        self._started_s = started_s
        self._mqtt = mqtt
        self.loop_lag_s = 0.0
        """The longest delay of the event loop since the last scrape, in seconds."""

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/metrics", self.summed, "Metrics per virtual host, for Prometheus.", Access.PUBLIC),
            Route(
                "GET", "/metrics/per-object", self.per_object, "Metrics per queue and connection.", Access.MONITORING
            ),
        ]

    async def summed(self, call: Call) -> Response:
        """Return the metrics per virtual host. A setting decides whether they are public."""
        if not self._is_public():
            user = await self._authenticator.user(call.request)
            if not allowed(user.tags, Access.MONITORING):
                raise HttpError(403, f"user {user.name!r} needs the tag monitoring")
        vhosts = self._scope.up()
        sums = [(vhost, await self._totals.of(vhost)) for vhost in vhosts]
        metrics = [*self._process(), *self._node(), *self._counted_by_mqtt(), *_summed(sums), *await _stores(vhosts)]
        return Response(200, expose(metrics), CONTENT_TYPE)

    async def per_object(self, call: Call) -> Response:
        rows: list[tuple[dict[str, str], Totals]] = []
        left = OBJECTS_MAX
        turns = Turns()
        for vhost in self._scope.up():
            for name in list(vhost.queues.by_name)[:left]:
                queue = vhost.queues.by_name.get(name)
                if queue is not None:
                    one = Totals()
                    one.add(vhost, queue)
                    rows.append(({"vhost": vhost.name, "queue": name}, one))
                    left -= 1
                await turns.yield_if_due()
        left_out = sum(len(vhost.queues.by_name) for vhost in self._scope.up()) - len(rows)
        extra = [
            Metric("basalt_objects_left_out", "gauge", "Queues omitted because of the limit.", [({}, left_out)]),
            *self._connections(),
        ]

        def text() -> bytes:
            return expose([*(_metric(at, rows, "detailed_") for at in range(1, len(_TOTALS))), *extra])

        return Response(200, await asyncio.to_thread(text), CONTENT_TYPE)

    def _process(self) -> Iterator[Metric]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        yield Metric("process_cpu_seconds_total", "counter", "CPU time used.", [({}, cpu_s)])
        yield Metric("process_resident_memory_bytes", "gauge", "Resident memory.", [({}, resident_bytes())])
        yield Metric("process_open_fds", "gauge", "Open files.", [({}, len(os.listdir("/proc/self/fd")))])
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield Metric("process_max_fds", "gauge", "Limit of open files.", [({}, limit)])
        yield Metric("process_start_time_seconds", "gauge", "When the broker started.", [({}, self._started_s)])

    def _node(self) -> Iterator[Metric]:
        scope = self._scope
        labels = {"version": __version__, "node": scope.node_name}
        yield Metric("basalt_build_info", "gauge", "Version and name.", [(labels, 1)])
        uptime_s = time.time() - self._started_s
        yield Metric("basalt_uptime_seconds", "gauge", "Time since the broker started.", [({}, uptime_s)])
        lag, self.loop_lag_s = self.loop_lag_s, 0.0
        late = "The longest delay of the event loop since the last scrape."
        yield Metric("basalt_loop_lag_seconds", "gauge", late, [({}, lag)])
        alarms = scope.alarms()
        yield Metric("basalt_publishers_blocked", "gauge", "1 while publishers are blocked.", [({}, int(bool(alarms)))])
        counts: dict[str, int] = {}
        for connection in list(scope.connections):
            protocol = str(connection.info().get("protocol", "unknown"))
            counts[protocol] = counts.get(protocol, 0) + 1
        samples = [({"protocol": protocol}, count) for protocol, count in counts.items()]
        yield Metric("basalt_connections", "gauge", "Open connections.", samples or [({"protocol": "AMQP 0-9-1"}, 0)])
        states = [({"vhost": name}, int(state == "running")) for name, state in scope.vhost_states().items()]
        yield Metric("basalt_vhost_up", "gauge", "1 while the virtual host is running.", states)

    def _counted_by_mqtt(self) -> Iterator[Metric]:
        for name, value in self._mqtt().items():
            yield Metric(f"basalt_mqtt_{name}_total", "counter", f"MQTT: {name.replace('_', ' ')}.", [({}, value)])

    def _connections(self) -> Iterator[Metric]:
        fields = (("recv_oct", "received_bytes_total"), ("send_oct", "sent_bytes_total"))
        infos = [connection.info() for connection in list(self._scope.connections)[:OBJECTS_MAX]]
        for field, name in fields:
            samples = [
                ({"connection": str(info["name"]), "vhost": str(info.get("vhost", ""))}, int(info[field]))
                for info in infos
                if field in info
            ]
            yield Metric(f"basalt_connection_{name}", "counter", "Bytes on a connection.", samples)


def _summed(sums: list[tuple[VHost, Totals]]) -> Iterator[Metric]:
    rows = [({"vhost": vhost.name}, totals) for vhost, totals in sums]
    for at in range(len(_TOTALS)):
        yield _metric(at, rows, "")


def _metric(at: int, rows: list[tuple[dict[str, str], Totals]], prefix: str) -> Metric:
    name, kind, meaning = _TOTALS[at]
    field = Totals.__struct_fields__[at]
    samples = [(labels, getattr(totals, field)) for labels, totals in rows]
    return Metric(f"basalt_{prefix}{name}", kind, meaning, samples)  # type: ignore[arg-type]


async def _stores(vhosts: list[VHost]) -> list[Metric]:
    sizes = [({"vhost": vhost.name}, await asyncio.to_thread(vhost.store.size_bytes)) for vhost in vhosts]
    rows = [({"vhost": vhost.name}, vhost.plane.damage.total()) for vhost in vhosts]
    ranges = [
        ({"vhost": vhost.name}, vhost.store.unreadable()) for vhost in vhosts if isinstance(vhost.store, RocksStore)
    ]
    frames = [({"vhost": vhost.name}, vhost.streams.damaged_count()) for vhost in vhosts]
    return [
        Metric("basalt_store_size_bytes", "gauge", "Size of the virtual host's store.", sizes),
        Metric("basalt_rows_quarantined", "gauge", "Damaged rows in quarantine, with or without a queue.", rows),
        Metric("basalt_store_unreadable_ranges", "gauge", "Row ranges that cannot be read.", ranges),
        Metric("basalt_log_damaged_frames", "gauge", "Batches of topics that reads found damaged.", frames),
    ]
