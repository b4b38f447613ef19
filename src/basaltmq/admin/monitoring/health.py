"""Health checks for load balancers and monitors: 200 if the check passes, 503 and a reason if not.

`/healthz` needs no password and only reports whether the broker serves requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

from basaltmq.admin.http.message import HttpError, Response
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.auth.tls import expires_at_s
from basaltmq.broker.config.settings import Config
from basaltmq.errors import BasaltError
from basaltmq.store.rocks import RocksStore

UNITS_S: Final = {"days": 86_400, "weeks": 7 * 86_400, "months": 30 * 86_400, "years": 365 * 86_400}
PROTOCOLS: Final = {
    "amqp": "amqp",
    "amqp091": "amqp",
    "amqps": "amqps",
    "http": "admin",
    "grpc": "fila",
    "kafka": "kafka",
}


def passed(**more: Any) -> dict[str, Any]:
    return {"status": "ok", **more}


def failed(reason: str, **more: Any) -> Response:
    return Response(503, msgspec.json.encode({"status": "failed", "reason": reason, **more}))


class Health:
    """Handlers of the health checks."""

    def __init__(self, scope: Scope, config: Callable[[], Config]) -> None:
        self._scope = scope
        self._config = config

    def routes(self) -> list[Route]:
        checks = "/api/health/checks"
        return [
            Route("GET", "/healthz", self.alive, "Checks that the broker serves requests.", Access.PUBLIC),
            Route("GET", checks + "/alarms", self.alarms, "Checks that no memory, disk or store alarm is active."),
            Route("GET", checks + "/local-alarms", self.alarms, "Same as alarms: a broker is one node."),
            Route("GET", checks + "/virtual-hosts", self.vhosts, "Checks that all virtual hosts are running."),
            Route("GET", checks + "/store-damage", self.damage,
                  "Checks that no damage was found in stores and logs.",
                  returns="damaged: unreadable ranges by virtual host. frames: unreadable batches, with topic, "
                          "partition and offsets. log: losses the last start found. down: stores that do not open."),
            Route("GET", checks + "/port-listener/{port}", self.port, "Checks that the broker listens on a port."),
            Route("GET", checks + "/protocol-listener/{protocol}", self.protocol,
                  "Checks that the broker listens for a protocol."),
            Route("GET", checks + "/certificate-expiration/{within}/{unit}", self.certificates,
                  "Checks that the certificate does not expire within this time.",
                  returns="unit is days, weeks, months or years."),
            Route("GET", checks + "/node-is-quorum-critical", self.alone, "Always passes: a broker is one node."),
            Route("GET", "/api/aliveness-test/{vhost}", self.aliveness, "Checks that a virtual host is running.",
                  Access.MANAGEMENT),
        ]  # fmt: skip

    def alive(self, _call: Call) -> Any:
        return passed()

    def alarms(self, _call: Call) -> Any:
        found = self._scope.alarms()
        if found:
            return failed("publishers are blocked: " + "; ".join(found), alarms=found)
        return passed()

    def vhosts(self, _call: Call) -> Any:
        down = [name for name, state in self._scope.vhost_states().items() if state != "running"]
        if down:
            return failed(f"virtual hosts are down: {', '.join(down)}", **{"virtual-hosts": down})
        return passed()

    def damage(self, _call: Call) -> Any:
        damaged = {
            vhost.name: vhost.store.unreadable()
            for vhost in self._scope.up()
            if isinstance(vhost.store, RocksStore) and vhost.store.unreadable()
        }
        frames = {vhost.name: found for vhost in self._scope.up() if (found := vhost.streams.damaged_frames())}
        log = {vhost.name: found for vhost in self._scope.up() if (found := vhost.streams.log_faults())}
        down = self._scope.unopenable()
        reasons = []
        if down:
            named = "; ".join(f"{name}: {error}" for name, error in down.items())
            reasons.append(f"stores that do not open: {named}; verify and repair them")
        if damaged:
            named = ", ".join(f"{name} ({count} ranges)" for name, count in damaged.items())
            reasons.append(f"unreadable rows: {named}; stop the broker and repair the store")
        if frames:
            named = "; ".join(f"{name}: {found[0]}" for name, found in frames.items())
            reasons.append(f"unreadable batches: {named}; restore the log from a backup")
        if log:
            named = "; ".join(f"{name}: {found[0]}" for name, found in log.items())
            reasons.append(f"lost parts of the log: {named}; restore the log from a backup")
        if reasons:
            return failed("; ".join(reasons), damaged=damaged, frames=frames, log=log, down=down)
        return passed()

    def port(self, call: Call) -> Any:
        ports = sorted(self._scope.ports.values())
        if call.names["port"] in map(str, ports):
            return passed(port=int(call.names["port"]))
        return failed(f"the broker does not listen on port {call.names['port']}", ports=ports)

    def protocol(self, call: Call) -> Any:
        asked = call.names["protocol"]
        if PROTOCOLS.get(asked, asked) in self._scope.ports:
            return passed(protocol=asked)
        return failed(f"the broker does not listen for {asked}", protocols=sorted(self._scope.ports))

    def certificates(self, call: Call) -> Any:
        unit = UNITS_S.get(call.names["unit"])
        if unit is None or not call.names["within"].isdigit():
            raise HttpError(400, "the period must be a number and one of days, weeks, months, years")
        tls = self._config().tls
        if tls.certificate is None:
            return passed()
        try:
            left_s = expires_at_s(tls) - time.time()
        except BasaltError as error:
            return failed(str(error))
        if left_s < int(call.names["within"]) * unit:
            return failed(f"the certificate {tls.certificate} expires in {left_s / 86_400:.0f} days")
        return passed()

    def alone(self, _call: Call) -> Any:
        return passed(reason="a broker is one node")

    def aliveness(self, call: Call) -> Any:
        self._scope.vhost(call)
        return passed()
