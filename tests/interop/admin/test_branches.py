"""Prepared XA branches of a running broker: listed, committed, rolled back and forgotten by an operator."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result
from tests.interop.server import Broker

import basaltmq
from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.cli.main import main
from basaltmq.errors import RemoteError
from basaltmq.http_client import path
from basaltmq.queues.transactions.xid import Xid

FIRST, SECOND = Xid(1, b"global", b"a"), Xid(1, b"global", b"b")


def prepare(broker: Broker) -> None:
    """Prepare two branches in the store of the virtual host, as an embedded resource manager does."""
    broker.call("PUT", "/api/queues/%2F/jobs", {"durable": True})
    broker.stop()
    with basaltmq.open(VHostDirectories(broker.data_dir).path("/") / "store") as db:
        for body in (b"one", b"two", b"three"):
            db.queue("jobs").enqueue(body)
        for xid in (FIRST, SECOND):
            with db.xa.begin(xid) as session:
                session.dequeue("jobs")
                session.enqueue("jobs", b"more-" + xid.branch_id)
            db.xa.prepare(xid)
    broker.start()


def ready(broker: Broker) -> list[str]:
    found = broker.call("POST", "/api/queues/%2F/jobs/get", {"count": 10, "ackmode": "peek", "encoding": "auto"})
    return [each["payload"] for each in found]


@pytest.mark.spec("A6", "I4")
def test_an_operator_decides_branches_of_a_broker(own_broker: Broker) -> None:
    broker = own_broker
    prepare(broker)

    def basalt(*words: str, code: int = 0) -> Result:
        result = CliRunner(env={"BASALT_SERVER": broker.url("admin")}).invoke(main, ["queue", *words])
        assert result.exit_code == code, f"{words}: {result.output} {result.exception!r}"
        return result

    listed = broker.call("GET", "/api/xa/%2F")
    assert [(each["xid"], each["state"], each["held"], each["to_enqueue"]) for each in listed] == [
        (str(FIRST), "prepared", 1, 1),
        (str(SECOND), "prepared", 1, 1),
    ]
    assert ready(broker) == ["three"]
    with pytest.raises(RemoteError):
        broker.call("DELETE", path("queues", "/", "jobs"))
    basalt("commit", str(FIRST), "--yes")
    assert ready(broker) == ["three", "more-a"]
    # The decision and the other branch survive a crash.
    broker.kill()
    broker.start()
    shown = json.loads(basalt("transactions", "--json").stdout)
    assert [each["state"] for each in shown] == ["committed by an operator", "prepared"]
    broker.call("POST", path("xa", "/", str(SECOND), "rollback"), {})
    assert sorted(ready(broker)) == ["more-a", "three", "two"]
    for xid in (FIRST, SECOND):
        basalt("forget", str(xid), "--yes")
    assert "no prepared branches" in basalt("transactions").stdout
    assert "xa_unknown_xid" in basalt("commit", str(FIRST), "--yes", code=1).output
