"""The life cycle of a broker process.

    bind every port ─> open the data ─> listen ─> READY ─> serve ─┬─ SIGHUP: reload settings and certificates
                                                                  └─ SIGTERM, SIGINT, a vhost that stays down: stop

A stop has four steps. Publishers are blocked. Messages already received are made durable and confirmed. Clients get a
close frame and have `stop.grace_ms` to respond. Stores are closed with a clean checkpoint. A second signal skips the
grace period. A third signal ends the process at once: the next start runs a recovery, and no confirmed message is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from basaltmq.admin.api import AdminApi
from basaltmq.admin.objects.definitions_file import read_definitions
from basaltmq.broker.auth.tls import reload_files, server_context
from basaltmq.broker.config.settings import Config
from basaltmq.broker.config.sources import Loaded, changed
from basaltmq.broker.data_directory import protect
from basaltmq.broker.node import Node
from basaltmq.cli.server.collector import Collector
from basaltmq.cli.server.listeners import (
    MQTT_SECTIONS,
    AdminListener,
    AmqpListener,
    FilaListener,
    KafkaListener,
    Listener,
    MqttListener,
    RocketmqListener,
)
from basaltmq.cli.server.logs import Logs
from basaltmq.cli.server.sockets import bind_all, raise_file_limit
from basaltmq.cli.server.systemd import Notifier
from basaltmq.errors import BasaltError
from basaltmq.protocols.mqtt.administration import Administration

STOPPING: Final = "stopping"
STOPPING_TEXT: Final = "the broker is stopping"
BEAT_S: Final = 1.0
"""Interval of the event-loop lag measurement."""

START_EXTENSION_S: Final = 600
"""Start time requested from systemd, for the recovery of large stores."""

SIGNALS_TO_EXIT: Final = 3
KILLED: Final = 137
VHOST_DOWN: Final = 74
"""Exit code (EX_IOERR) when a virtual host stays down and `vhosts.on_failure` is `stop_node`."""

_log: Final = logging.getLogger("basaltmq.serve")


class Serving:
    """One run of `basalt serve`."""

    def __init__(
        self,
        loaded: Loaded,
        settings: Callable[[], Loaded],
        logs: Logs,
        environment: Mapping[str, str],
        *,
        recover_vhosts: bool = False,
    ) -> None:
        self._config = loaded.config
        self._settings = settings
        self._recover_vhosts = recover_vhosts
        self._logs = logs
        self._notifier = Notifier(environment)
        self._signals = 0
        self._stop = asyncio.Event()
        self._skip_grace = asyncio.Event()
        self._tls: ssl.SSLContext | None = None
        self._listeners: list[Listener] = []
        self._api: AdminApi | None = None
        self._mqtt: Administration | None = None
        self._node: Node | None = None
        self.ports: dict[str, int] = {}
        self.code = 0
        """Exit code of the process."""

    async def run(self, ready: Callable[[Config, Mapping[str, int]], None]) -> None:
        """Serve until a stop is requested. `ready` is called when all listeners are up."""
        config = self._config
        if config.tls.certificate is not None:
            self._tls = server_context(config.tls)
        raise_file_limit(config)
        sockets = bind_all(config)
        try:
            self._watch_signals()
            self._notifier.extend(START_EXTENSION_S)
            began = time.monotonic()
            warning = protect(config.data_dir)
            node = self._node = await Node.open(config, recover_vhosts=self._recover_vhosts)
            if warning is not None:
                _log.warning("%s", warning)
            try:
                self.ports |= {section: sock.getsockname()[1] for section, sock in sockets.items()}
                await self._listen(node, sockets)
                _log.info("ready after %.2f s", time.monotonic() - began, extra={"ports": dict(self.ports)})
                self._notifier.ready("serving")
                ready(config, self.ports)
                with Collector():
                    await self._serve(node)
            finally:
                await self._end(node)
        finally:
            for sock in sockets.values():
                sock.close()

    async def _listen(self, node: Node, sockets: dict[str, socket.socket]) -> None:
        config = self._config
        api = self._api = AdminApi(node, lambda: self._config, self.ports, lambda: self._mqtt)
        mqtt: MqttListener | None = None
        if any(section in sockets for section in MQTT_SECTIONS):
            # Before the definitions, which may have rules of MQTT.
            mqtt = MqttListener(node, config, sockets, self._tls)
            self._mqtt = Administration(mqtt.server)
        if config.load_definitions is not None:
            await _load(api, config.load_definitions)
        if "amqp" in sockets or "amqps" in sockets:
            self._listeners.append(AmqpListener(node, config, sockets, self._tls))
        if "fila" in sockets:
            self._listeners.append(FilaListener(node, config, sockets["fila"]))
        if "kafka" in sockets:
            self._listeners.append(KafkaListener(node, config, sockets["kafka"], self._tls))
        if mqtt is not None:
            self._listeners.append(mqtt)
        if "rocketmq" in sockets:
            self._listeners.append(RocketmqListener(node, config, sockets["rocketmq"]))
        if "admin" in sockets:
            self._listeners.append(AdminListener(api, config, sockets["admin"], self._tls))
        for listener in self._listeners:
            await listener.start()

    async def _serve(self, node: Node) -> None:
        beats = asyncio.create_task(self._beat())
        waits = [asyncio.create_task(self._stop.wait()), asyncio.create_task(node.stop_requested.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if node.stop_requested.is_set():
                self.code = VHOST_DOWN
        finally:
            for task in (beats, *waits):
                task.cancel()
            await asyncio.gather(beats, *waits, return_exceptions=True)

    async def _beat(self) -> None:
        """Measure the lag of the event loop, and notify the systemd watchdog."""
        every_s = self._notifier.watchdog_s
        notified_s = 0.0
        while True:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            late_s = time.monotonic() - due
            if self._api is not None:
                self._api.metrics.loop_lag_s = max(self._api.metrics.loop_lag_s, late_s)
            if every_s is not None and due - notified_s >= every_s:
                notified_s = due
                self._notifier.alive()

    async def _end(self, node: Node) -> None:
        self._notifier.stopping()
        began = time.monotonic()
        grace_s = 0.0 if self._skip_grace.is_set() else self._config.stop.grace_ms / 1000
        _log.info("stopping")
        node.alarms.set(STOPPING, STOPPING_TEXT)
        finishing = asyncio.create_task(self._finish(node, grace_s))
        skip = asyncio.create_task(self._skip_grace.wait())
        await asyncio.wait([finishing, skip], return_when=asyncio.FIRST_COMPLETED)
        if not finishing.done():
            finishing.cancel()
            await asyncio.gather(finishing, return_exceptions=True)
            await asyncio.gather(*(listener.close(0.0) for listener in self._listeners), return_exceptions=True)
        skip.cancel()
        await asyncio.gather(skip, return_exceptions=True)
        await node.close()
        _log.info("stopped after %.2f s", time.monotonic() - began)

    async def _finish(self, node: Node, grace_s: float) -> None:
        """Confirm the messages received, then close the listeners."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s or 0.01):
                await _wait_for_confirms(node)
        closing = [listener.close(grace_s) for listener in self._listeners]
        for error in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(error, Exception):
                _log.error("a listener failed to close: %s", error)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def _stop_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            _log.info("%s received, shutting down; send it again to skip the grace period", signal.Signals(number).name)
            self._stop.set()
        elif self._signals < SIGNALS_TO_EXIT:
            _log.warning(
                "%s received again, skipping the grace period; send it once more to exit at once",
                signal.Signals(number).name,
            )
            self._skip_grace.set()
        else:
            os._exit(KILLED)

    def reload(self) -> None:
        """Reload settings and certificates. On an error nothing changes. Settings that need a restart are logged."""
        self._notifier.reloading()
        try:
            merged, taken, waiting = changed(self._config, self._settings().config)
            if self._tls is not None and merged.tls.certificate is not None:
                reload_files(self._tls, merged.tls)
        except BasaltError as error:
            _log.error("reload failed: %s; the previous settings stay in effect", error)
        else:
            self._config = merged
            self._logs.change(merged.log.level, merged.log.format)
            if self._node is not None:
                self._node.reconfigure(merged)
            if waiting:
                _log.warning("reload: these settings take effect after a restart: %s", ", ".join(waiting))
            _log.info("reloaded%s", f": {', '.join(taken)}" if taken else "; no setting changed")
        self._notifier.ready("serving")


async def _load(api: AdminApi, path: Path) -> None:
    done = await api.definitions.import_definitions(read_definitions(path))
    for line in done["skipped"]:
        _log.warning("%s: skipped: %s", path, line)
    _log.info("%s imported", path, extra=done["imported"])


async def _wait_for_confirms(node: Node) -> None:
    """Wait until all published messages are durable and confirmed."""
    for name in node.vhosts():
        try:
            vhost = node.vhost(name)
        except BasaltError:
            continue
        tick = vhost.tick
        while vhost.is_up and (tick.gathered.publishes or tick.gathered.enqueues or tick.unsynced):
            await vhost.commit.durable()
            await asyncio.sleep(0)
