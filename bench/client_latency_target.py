"""The ports of the broker that `client_latency` measures."""

from __future__ import annotations

import http.client
from typing import Final, NamedTuple

from bench.amqp_wire import Wire

from basaltmq.http_client import HttpClient, Login

SETUP_S: Final = 300.0


class Target(NamedTuple):
    """The ports of a broker."""

    amqp: int
    admin: int
    fila: int
    kafka: int
    mqtt: int
    mqtt_ws: int
    rocketmq: int

    def wire(self, vhost: str = "/") -> Wire:
        return Wire(self.amqp, vhost, timeout_s=SETUP_S)

    def api(self) -> HttpClient:
        return HttpClient(Login(f"http://127.0.0.1:{self.admin}"))

    def text(self, path: str) -> bytes:
        """GET without JSON: metrics. Metrics per object need a login; `guest` is used."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin, timeout=SETUP_S)
        connection.request("GET", path, headers={"Authorization": "Basic Z3Vlc3Q6Z3Vlc3Q="})
        body = connection.getresponse().read()
        connection.close()
        return body
