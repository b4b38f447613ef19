"""The admin API: the route table of all resources, with its documentation and metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from basaltmq.admin.http.application import AdminApplication
from basaltmq.admin.http.auth import Authenticator
from basaltmq.admin.http.host_check import HostCheck
from basaltmq.admin.http.message import Response
from basaltmq.admin.http.openapi import PAGE_POLICY, document, page
from basaltmq.admin.http.routes import Access, Call, Route, RouteTable
from basaltmq.admin.http.scope import Scope
from basaltmq.admin.monitoring.health import Health
from basaltmq.admin.monitoring.metrics import Metrics
from basaltmq.admin.monitoring.overview import Overview
from basaltmq.admin.monitoring.totals import TotalsCache
from basaltmq.admin.objects.bindings import Bindings
from basaltmq.admin.objects.branches import Branches
from basaltmq.admin.objects.connections import Connections
from basaltmq.admin.objects.definitions import DefinitionTransfer
from basaltmq.admin.objects.exchanges import Exchanges
from basaltmq.admin.objects.limits import Limits
from basaltmq.admin.objects.mqtt import Mqtt, MqttState
from basaltmq.admin.objects.policies import Policies
from basaltmq.admin.objects.principals import Principals
from basaltmq.admin.objects.quarantine import QuarantinedRows
from basaltmq.admin.objects.queues import Queues
from basaltmq.admin.objects.store import StoreTools
from basaltmq.admin.objects.vhosts import Vhosts
from basaltmq.admin.streams.arrow_stream import ArrowStreams
from basaltmq.admin.streams.imports import StreamImports
from basaltmq.admin.streams.queue_messages import QueueMessages
from basaltmq.admin.streams.subscription_groups import SubscriptionGroupRoutes
from basaltmq.admin.streams.topic_records import TopicRecords
from basaltmq.admin.streams.topics import Topics
from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.broker.vhost_directory import BACKUPS


class AdminApi:
    """The application behind the admin port."""

    def __init__(
        self,
        node: Node,
        config: Callable[[], Config],
        ports: Mapping[str, int],
        mqtt: Callable[[], MqttState | None] = lambda: None,
    ) -> None:
        """`config` returns the current settings. `ports` maps each listener section to its port. `mqtt` returns the
        state of the MQTT listeners, or None if there are none."""
        scope = Scope(node, config, ports)
        totals = TotalsCache()
        arrow = ArrowStreams()
        authenticator = Authenticator(node.users)
        started_s = time.time()
        principals = Principals(scope, node.users, node.permissions)
        self.definitions = DefinitionTransfer(scope, principals, mqtt)

        def counters() -> dict[str, int]:
            state = mqtt()
            return {} if state is None else state.totals()

        self.metrics = Metrics(
            scope,
            totals,
            authenticator,
            is_public=lambda: config().admin.metrics_public,
            started_s=started_s,
            mqtt=counters,
        )
        routes: list[Route] = [
            *Overview(scope, totals, config, started_s).routes(),
            *Vhosts(scope, totals).routes(),
            *Limits(scope).routes(),
            *StoreTools(scope, lambda: config().admin.backup_dir or config().data_dir / BACKUPS).routes(),
            *principals.routes(),
            *Queues(scope).routes(),
            *QuarantinedRows(scope).routes(),
            *Branches(scope).routes(),
            *Exchanges(scope).routes(),
            *Bindings(scope).routes(),
            *Policies(scope).routes(),
            *Connections(scope).routes(),
            *Mqtt(scope, mqtt).routes(),
            *Topics(scope, arrow).routes(),
            *TopicRecords(scope).routes(),
            *SubscriptionGroupRoutes(scope).routes(),
            *StreamImports(scope).routes(),
            *QueueMessages(scope, arrow).routes(),
            *self.definitions.routes(),
            *Health(scope, config).routes(),
            *self.metrics.routes(),
        ]
        self.table = RouteTable([*routes, *self._documentation(routes)])
        hosts = HostCheck(config().admin.host or config().host, lambda: config().admin.allowed_hosts)
        self.application = AdminApplication(self.table, authenticator, hosts)

    @staticmethod
    def _documentation(routes: list[Route]) -> list[Route]:
        described = document(routes)

        def openapi(_call: Call) -> Response:
            return Response(200, msgspec.json.encode(described))

        def docs(call: Call) -> Response:
            server = f"http://{call.request.headers.get('host', 'localhost:15672')}"
            headers = {"Content-Security-Policy": PAGE_POLICY}
            return Response(200, page(routes, server).encode(), "text/html; charset=utf-8", headers)

        def home(_call: Call) -> Response:
            return Response(302, headers={"Location": "/api/docs"})

        return [
            Route("GET", "/api/openapi.json", openapi, "The OpenAPI document of this API.", Access.PUBLIC),
            Route("GET", "/api/docs", docs, "The documentation of this API as an HTML page.", Access.PUBLIC),
            Route("GET", "/api", home, "Redirects to the documentation.", Access.PUBLIC),
            Route("GET", "/", home, "Redirects to the documentation.", Access.PUBLIC),
        ]
