"""A client of the admin API: reads all pages, creates and deletes queues, publishes."""

from __future__ import annotations

from tests.soak.clients import Client, Round
from tests.soak.ledger import CONFIRMED, TRIED

from basaltmq.errors import BasaltError, RemoteError
from basaltmq.http_client import path

READS = ("overview", "vhosts", "users", "definitions")


class AdminClient(Client):
    """A response with status 500 is a problem."""

    expected = (OSError, BasaltError)

    def __init__(self, turn: Round, vhosts: tuple[str, ...]) -> None:
        super().__init__(turn, "admin")
        self.vhosts = vhosts

    def session(self) -> None:
        api = self.broker.api()
        while self.turn.pause(0.1):
            vhost = self.random.choice(self.vhosts)
            step = self.random.randrange(5)
            if step == 0:
                api.get(path(self.random.choice(READS)))
            elif step == 1:
                api.get(path("queues", vhost))
                api.get(path("topics", vhost))
            elif step == 2:
                name = f"temporary-{self.random.randrange(5)}"
                api.put(path("queues", vhost, name), {"durable": True})
                api.delete(path("queues", vhost, name))
            elif step == 3:
                api.get(path("exchanges", vhost))
                api.get(path("groups", vhost))
            else:
                self._publish(vhost)

    def _publish(self, vhost: str) -> None:
        (label,) = self.ledger.next_label("admin")
        place = f"{vhost}|work"
        self.ledger.mark((place,), (label,), TRIED)
        body = {
            "properties": {"delivery_mode": 2},
            "routing_key": "work",
            "payload": label.body().decode(),
            "payload_encoding": "string",
        }
        reported = self.broker.call("POST", path("exchanges", vhost, "amq.default", "publish"), body)
        if reported["routed"]:
            self.ledger.mark((place,), (label,), CONFIRMED)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, RemoteError) and error.status == 500 and not self.turn.stopping.is_set():
            self.ledger.problem(f"{self.name}: the broker answered 500: {error}")
        super()._failed(error)
