"""State after a clean stop and after kill -9, through the interfaces of a broker."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path

import pika
import pytest
from tests.interop.amqp091.conftest import connect
from tests.interop.server import Broker

from basaltmq.catalog.catalog import Catalog
from basaltmq.errors import BasaltError
from basaltmq.store.directory import MARKER
from basaltmq.store.open import open_store

WAIT_S = 60.0
PERSISTENT = pika.BasicProperties(delivery_mode=2)


@pytest.mark.spec("A2", "D1")
@pytest.mark.promise("P1", "P2", "P10")
def test_configured_objects_are_complete_or_absent_after_kill_9(own_broker: Broker) -> None:
    confirmed: list[str] = []

    def configure_until_killed() -> None:
        api = own_broker.api()
        with contextlib.suppress(BasaltError, OSError):
            for number in range(10_000):
                name = f"user{number}"
                api.call("PUT", f"/api/users/{name}", {"password": "a long secret", "tags": ""})
                api.call("PUT", f"/api/permissions/%2F/{name}", {"configure": "", "write": "w", "read": str(number)})
                api.call("PUT", f"/api/policies/%2F/p{number}", {"pattern": name, "definition": {"max-length": 5}})
                confirmed.append(name)

    thread = threading.Thread(target=configure_until_killed)
    thread.start()
    until = time.monotonic() + WAIT_S
    while len(confirmed) < 5 and time.monotonic() < until:
        time.sleep(0.01)
    own_broker.kill()
    thread.join(WAIT_S)
    own_broker.start()
    assert len(confirmed) >= 5
    users = {each["name"] for each in own_broker.call("GET", "/api/users")}
    permissions = {each["user"]: each["read"] for each in own_broker.call("GET", "/api/permissions")}
    policies = {each["pattern"] for each in own_broker.call("GET", "/api/policies")}
    assert set(confirmed) <= users & policies
    assert {name: permissions[name] for name in confirmed} == {name: name[4:] for name in confirmed}
    assert set(permissions) <= users
    # The descendants of a deleted object are deleted too, and do not reappear.
    own_broker.call("DELETE", f"/api/users/{confirmed[0]}")
    own_broker.call("PUT", f"/api/permissions/%2F/{confirmed[1]}", {"configure": "", "write": "", "read": "new"})
    own_broker.kill()
    own_broker.start()
    permissions = {each["user"]: each["read"] for each in own_broker.call("GET", "/api/permissions")}
    assert confirmed[0] not in {each["name"] for each in own_broker.call("GET", "/api/users")} | set(permissions)
    assert permissions[confirmed[1]] == "new"
    own_broker.call("PUT", f"/api/users/{confirmed[0]}", {"password": "a long secret", "tags": ""})
    assert confirmed[0] not in {each["user"] for each in own_broker.call("GET", "/api/permissions")}
    assert own_broker.stop() == 0
    assert catalog_faults(own_broker.data_dir) == []


def catalog_faults(data_dir: Path) -> list[str]:
    """Return dangling parents and other faults in the catalogs of a stopped broker."""
    found: list[str] = []
    markers = list(data_dir.rglob(MARKER))
    assert markers
    for marker in markers:
        with contextlib.closing(open_store(marker.parent, create=False)) as store:
            catalog = Catalog(store)
            catalog.open()
            found += [str(fault) for fault in catalog.check().faults]
            catalog.close()
    return found


@pytest.mark.spec("E10")
@pytest.mark.promise("P1")
def test_a_clean_stop_and_a_kill_keep_every_queue_with_its_order_and_counts(own_broker: Broker) -> None:
    names = ("one", "two", "three")

    def counts() -> dict[str, int]:
        with contextlib.closing(connect(own_broker)) as connection:
            channel = connection.channel()
            return {name: channel.queue_declare(name, passive=True).method.message_count for name in names}

    with contextlib.closing(connect(own_broker)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in names:
            channel.queue_declare(name, durable=True)
        for number in range(20):
            for name in names:
                channel.basic_publish("", name, b"%d" % number, PERSISTENT)
        held = [channel.basic_get("two")[2] for _ in range(3)]
        assert held == [b"0", b"1", b"2"]
    assert own_broker.stop() == 0
    own_broker.start()
    assert counts() == dict.fromkeys(names, 20)
    with contextlib.closing(connect(own_broker)) as connection:
        channel = connection.channel()
        assert [channel.basic_get("one", auto_ack=True)[0].redelivered for _ in range(2)] == [False, False]
        channel.confirm_delivery()
        channel.basic_publish("", "one", b"20", PERSISTENT)
    own_broker.kill()
    own_broker.start()
    assert counts() == {"one": 19, "two": 20, "three": 20}
    with contextlib.closing(connect(own_broker)) as connection:
        channel = connection.channel()
        for name, first, end in (("one", 2, 21), ("two", 0, 20), ("three", 0, 20)):
            got = [channel.basic_get(name, auto_ack=True) for _ in range(first, end)]
            assert [body for _, _, body in got] == [b"%d" % number for number in range(first, end)]
            # After a crash it is unknown whether it was delivered before.
            assert all(method.redelivered for method, _, _ in got)
