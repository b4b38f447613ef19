"""A broker's data directory: virtual hosts are created, fail and are deleted, and a start recovers them (SPEC E9)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.broker.rig import FakePublisher, FakeSink, drain, publish, settlement, until

from basaltmq.broker.config.settings import Config, Disk, Vhosts
from basaltmq.broker.config.sizes import ByteCount
from basaltmq.broker.node import Node
from basaltmq.broker.peer import Peer
from basaltmq.broker.supervision import VHostState
from basaltmq.broker.vhost import REQUEUE
from basaltmq.broker.vhost_directory import NAME_FILE, VHostDirectories, directory_name, read_name
from basaltmq.catalog.kinds import Kind
from basaltmq.errors import (
    AlreadyExistsError,
    DiskFullError,
    InvalidArgumentError,
    StorageError,
    VHostDownError,
    VHostNotFoundError,
)


def with_node(path: Path, *tests: Callable[[Node], Awaitable[None]], config: dict[str, Any] | None = None) -> None:
    """Open a node for each test in turn, on one directory."""

    async def whole() -> None:
        for test in tests:
            node = await Node.open(msgspec.structs.replace(Config(data_dir=path), **(config or {})))
            try:
                await test(node)
            finally:
                await node.close()

    asyncio.run(whole())


class Connection:
    """A connection that can be closed."""

    def __init__(self, vhost: str) -> None:
        self.vhost = vhost
        self.closed: list[str] = []

    def info(self) -> dict[str, Any]:
        return {"name": "c", "vhost": self.vhost, "user": "guest"}

    def close(self, reason: str) -> None:
        self.closed.append(reason)


@pytest.mark.spec("E9")
def test_a_new_node_creates_a_vhost_and_a_user_and_keeps_them(tmp_path: Path) -> None:
    async def first(node: Node) -> None:
        assert node.is_new
        assert node.vhosts() == ["/"]
        user = await node.users.authenticate("guest", "guest", Peer("127.0.0.1", is_loopback=True))
        node.permissions.check(user, "/", "configure", "anything")
        node.vhost("/").declare_queue("q", durable=True)

    async def second(node: Node) -> None:
        assert not node.is_new
        assert list(node.vhost("/").queues.by_name) == ["q"]
        assert node.quarantined == []

    with_node(tmp_path, first, second)
    path = tmp_path / "vhosts" / directory_name("/")
    assert read_name(path) == "/"


@pytest.mark.spec("E9")
@pytest.mark.promise("P10")
def test_vhosts_are_isolated_and_can_be_deleted(tmp_path: Path) -> None:
    name = "../../über/\n"

    async def first(node: Node) -> None:
        await node.create_vhost(name)
        with pytest.raises(AlreadyExistsError):
            await node.create_vhost(name)
        for wrong in ("", "x" * 256):
            with pytest.raises(InvalidArgumentError):
                await node.create_vhost(wrong)
        await node.permissions.set("guest", name, configure=".*", write=".*", read=".*")
        node.vhost(name).declare_queue("theirs", durable=True)
        assert "theirs" not in node.vhost("/").queues.by_name
        connection, other = Connection(name), Connection("/")
        node.connections.add(connection)
        node.connections.add(other)
        await node.delete_vhost(name)
        assert len(connection.closed) == 1
        assert other.closed == []
        with pytest.raises(VHostNotFoundError):
            node.vhost(name)
        assert not node.directories.exists(name)
        await node.create_vhost(name)
        assert not node.vhost(name).queues.by_name
        assert not node.permissions.may_use("guest", name)

    async def second(node: Node) -> None:
        assert node.vhosts() == [name, "/"]

    with_node(tmp_path, first, second)


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
def test_a_disk_error_of_one_vhost_does_not_affect_others(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.create_vhost("bad")
        good, bad = node.vhost("/"), node.vhost("bad")
        reported: list[BaseException] = []
        bad.attach("connection", reported.append)
        for vhost in (good, bad):
            vhost.declare_queue("q", durable=True)
        publisher = FakePublisher()
        publish(bad, publisher, "q", b"confirmed")
        await until(lambda: publisher.numbers() == [1])
        bad.store.poison(OSError(5, "Input/output error"))
        publish(bad, publisher, "q", b"lost", first=2)
        await until(lambda: bool(reported))
        publish(good, publisher, "q", b"fine", first=3)
        await until(lambda: 3 in publisher.numbers())
        await until(lambda: node.supervised("bad").state is VHostState.RUNNING)
        assert 2 not in publisher.numbers()
        assert [each.payload for each in drain(node.vhost("bad"), "q")] == [b"confirmed"]
        assert node.vhost("/") is good

    with_node(tmp_path, test)


@pytest.mark.spec("E9")
@pytest.mark.parametrize("strategy", ["continue", "stop_node"])
def test_a_failed_vhost_stops_the_node_only_if_configured(tmp_path: Path, strategy: Any) -> None:
    async def test(node: Node) -> None:
        await node.create_vhost("bad")
        node.vhost("bad").fail(StorageError("the test breaks the disk"))
        assert node.supervised("bad").state is VHostState.DOWN
        with pytest.raises(VHostDownError, match="fix the cause, then start it"):
            node.vhost("bad")
        assert node.stop_requested.is_set() is (strategy == "stop_node")
        assert node.vhost("/").is_up
        await node.start_vhost("bad")
        assert node.vhost("bad").is_up

    with_node(tmp_path, test, config={"vhosts": Vhosts(on_failure=strategy, restarts_max=0)})


@pytest.mark.spec("E9")
def test_creating_a_vhost_that_fails_to_open_is_an_error(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        in_the_way = node.directories.path("new")
        in_the_way.write_text("a file")
        with pytest.raises(VHostDownError, match="vhost 'new' is down"):
            await node.create_vhost("new")
        in_the_way.unlink()
        await node.start_vhost("new")
        assert node.vhost("new").is_up

    with_node(tmp_path, test, config={"vhosts": Vhosts(restarts_max=0)})


@pytest.mark.spec("E9")
@pytest.mark.promise("P7")
def test_unknown_directories_are_quarantined_and_reported(tmp_path: Path) -> None:
    async def nothing(node: Node) -> None:
        pass

    with_node(tmp_path, nothing)
    stray = tmp_path / "vhosts" / "stray"
    stray.mkdir()
    (stray / "precious").write_text("kept")
    VHostDirectories(tmp_path).make("forgotten")

    async def found(node: Node) -> None:
        assert len(node.quarantined) == 2
        assert any("'forgotten', which does not exist" in line for line in node.quarantined)
        assert node.vhosts() == ["/"]

    with_node(tmp_path, found, nothing)
    assert (tmp_path / "quarantine" / "stray.0" / "precious").read_text() == "kept"
    assert read_name(tmp_path / "quarantine" / f"{directory_name('forgotten')}.0") == "forgotten"


@pytest.mark.promise("P7")
def test_a_vhost_with_a_missing_or_foreign_directory_stays_down_and_is_not_recreated(tmp_path: Path) -> None:
    async def make(node: Node) -> None:
        await node.create_vhost("one")
        await node.create_vhost("two")

    with_node(tmp_path, make)
    directories = VHostDirectories(tmp_path)
    directories.path("one").rename(tmp_path / "elsewhere")
    (directories.path("two") / NAME_FILE).write_bytes((directories.path("/") / NAME_FILE).read_bytes())

    async def found(node: Node) -> None:
        for name, text in (("one", "is missing"), ("two", "belongs to vhost '/', not to 'two'")):
            supervised = node.supervised(name)
            await until(lambda each=supervised: each.state is VHostState.DOWN)  # type: ignore[misc]
            assert text in str(supervised.error)
        assert node.vhost("/").is_up
        with pytest.raises(VHostDownError, match="is missing; restore it"):
            await node.restart_vhost("one")
        (tmp_path / "elsewhere").rename(directories.path("one"))
        await node.start_vhost("one")
        assert node.vhost("one").is_up

    with_node(tmp_path, found, config={"vhosts": Vhosts(restarts_max=0)})


def test_a_vhost_creation_interrupted_by_a_crash_is_completed_at_start(tmp_path: Path) -> None:
    async def cut_off(node: Node) -> None:
        await node.create_vhost("leaving")
        node.vhost("leaving").declare_queue("q", durable=True)
        found = node.catalog.find(Kind.VHOST, "leaving")
        assert found is not None
        node.catalog.update(found.id, {**found.attributes, "state": "deleting"})
        node.catalog.create(Kind.VHOST, "coming", attributes={"state": "new"})

    async def finished(node: Node) -> None:
        assert node.vhosts() == ["/", "coming"]
        assert node.vhost("coming").is_up
        assert not node.directories.exists("leaving")
        assert node.quarantined == []

    with_node(tmp_path, cut_off, finished)


@pytest.mark.spec("E10")
def test_a_graceful_close_completes_confirms_and_needs_no_recovery(tmp_path: Path) -> None:
    publisher = FakePublisher()

    async def first(node: Node) -> None:
        vhost = node.vhost("/")
        vhost.declare_queue("q", durable=True)
        sink = FakeSink(vhost)
        vhost.subscribe("q", sink, tag="c", prefetch=1)
        publish(vhost, publisher, "q", *(b"%d" % number for number in range(500)))
        await until(lambda: len(sink.got) == 1)
        vhost.settle([settlement("q", sink.got[0], REQUEUE)])

    async def second(node: Node) -> None:
        found = drain(node.vhost("/"), "q")
        assert [each.payload for each in found] == [b"%d" % number for number in range(500)]

    with_node(tmp_path, first, second)
    assert publisher.numbers() == list(range(1, 501))


@pytest.mark.spec("A11")
@pytest.mark.promise("P8")
def test_publishers_of_a_vhost_over_its_size_limit_are_blocked_until_it_shrinks(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.create_vhost("other")
        vhost = node.vhost("/")
        vhost.declare_queue("q", durable=True)
        here: list[str | None] = []
        there: list[str | None] = []
        node.on_blocked(here.append, vhost="/")
        node.on_blocked(there.append, vhost="other")
        publisher = FakePublisher()
        number = 0
        while not here:
            publish(vhost, publisher, "q", *(os.urandom(50_000) for _ in range(20)), first=number + 1)
            number += 20
            await until(lambda wanted=number: len(publisher.reported) == wanted)  # type: ignore[misc]
        assert "its limit is" in str(here[0])
        sink = FakeSink(vhost, ack=True)
        vhost.subscribe("q", sink, tag="c", prefetch=100)
        await until(lambda: len(sink.got) == number and here[-1] is None, 60)
        assert there == []

    with_node(tmp_path, test, config={"disk": Disk(vhost_max=ByteCount(16 << 20))})


def test_live_settings_are_applied_on_reload(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        heard: list[str | None] = []
        node.on_blocked(heard.append)
        node.on_blocked(heard.append, vhost="/")
        config = node.config
        disk = msgspec.structs.replace(config.disk, free_min=type(config.disk.free_min).parse("100%"))
        node.reconfigure(msgspec.structs.replace(config, disk=disk))
        await until(lambda: len(heard) == 2)
        assert all("low on disk" in str(each) for each in heard)
        node.reconfigure(config)
        await until(lambda: heard[2:] == [None, None])

    with_node(tmp_path, test)


@pytest.mark.spec("E9")
@pytest.mark.promise("P11")
@pytest.mark.parametrize("error", [DiskFullError("no space left"), StorageError("input/output error")])
def test_the_node_store_is_reopened_after_an_error(tmp_path: Path, error: StorageError) -> None:
    async def test(node: Node) -> None:
        await node.users.create("before", "x")
        vhost = node.vhost("/")
        node._store.poison(error)
        with pytest.raises(StorageError):
            await node.users.create("refused", "x")
        async with asyncio.timeout(30):
            while node._own_store._error() is not None:
                node._own_store.step()
                await asyncio.sleep(0.01)
        assert node.vhost("/") is vhost, "virtual hosts run on"
        await node.users.create("after", "x")
        await node.permissions.set("after", "/", configure=".*", write=".*", read=".*")

    async def later(node: Node) -> None:
        assert {user.name for user in node.users.list()} == {"guest", "before", "after"}
        assert node.permissions.may_use("after", "/")

    with_node(tmp_path, test, later)


@pytest.mark.spec("E9")
def test_the_node_store_stays_closed_after_too_many_errors(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        for _ in range(node.config.vhosts.restarts_max):
            node._store.poison(StorageError("input/output error"))
            async with asyncio.timeout(30):
                while node._own_store._error() is not None:
                    node._own_store.step()
                    await asyncio.sleep(0.01)
        node._store.poison(StorageError("input/output error"))
        for _ in range(3):
            node._own_store.step()
            await asyncio.sleep(0.01)
        assert node._own_store._error() is not None

    with_node(tmp_path, test)
