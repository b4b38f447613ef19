"""Starts with a data directory that has lost, damaged or foreign files (SPEC E9, P7)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.unit.broker.rig import FakePublisher, drain, publish, until

from basaltmq.broker.config.settings import Config, Vhosts
from basaltmq.broker.node import Node
from basaltmq.broker.peer import Peer
from basaltmq.broker.supervision import VHostState
from basaltmq.broker.vhost_directory import NAME_FILE, VHostDirectories, directory_name, read_name
from basaltmq.embedded.reconcile import reconcile_planes
from basaltmq.errors import BasaltError, CorruptionError, NotAStoreError, StorageError, VHostDownError
from basaltmq.store.repair import repair

VHOSTS = ("/", "shop")


def with_node(path: Path, test: Callable[[Node], Awaitable[None]], *, recover: bool = False) -> None:
    async def whole() -> None:
        config = Config(data_dir=path, vhosts=Vhosts(restarts_max=0))
        node = await Node.open(config, recover_vhosts=recover)
        try:
            await test(node)
        finally:
            await node.close()

    asyncio.run(whole())


async def fill(node: Node) -> None:
    """Put a message into a queue of each virtual host."""
    await node.create_vhost("shop")
    publisher = FakePublisher()
    for number, name in enumerate(VHOSTS, 1):
        node.vhost(name).declare_queue("q", durable=True)
        publish(node.vhost(name), publisher, "q", name.encode(), first=number)
    await until(lambda: publisher.numbers() == [1, 2])


async def holds_all(node: Node) -> None:
    assert node.vhosts() == list(VHOSTS)
    for name in VHOSTS:
        assert [each.payload for each in drain(node.vhost(name), "q")] == [name.encode()]


async def nothing(node: Node) -> None:
    pass


def contents(path: Path) -> dict[str, bytes | None]:
    return {str(each): each.read_bytes() if each.is_file() else None for each in sorted(path.rglob("*"))}


@pytest.mark.spec("E9")
@pytest.mark.promise("P7")
@pytest.mark.parametrize("raw", [None, b"", b"\0" * 40, b'00000000 {"name": "shop"}\n', b"\xff\xfe"])
def test_a_missing_or_damaged_name_file_is_rewritten(
    tmp_path: Path, raw: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    with_node(tmp_path, fill)
    file = VHostDirectories(tmp_path).path("shop") / NAME_FILE
    file.unlink() if raw is None else file.write_bytes(raw)
    with_node(tmp_path, holds_all)
    assert read_name(file.parent) == "shop"
    assert "rewriting the file" in caplog.text
    assert not (tmp_path / "quarantine").exists()


@pytest.mark.promise("P7")
def test_the_name_file_of_another_vhost_is_not_overwritten(tmp_path: Path) -> None:
    directories = VHostDirectories(tmp_path)
    for name in ("one", "two"):
        directories.make(name)
    file = directories.path("two") / NAME_FILE
    file.write_bytes((directories.path("one") / NAME_FILE).read_bytes())
    with pytest.raises(CorruptionError, match="belongs to vhost 'one', not to 'two'; restore the right directory"):
        directories.check("two")
    assert read_name(file.parent) == "one"


@pytest.mark.spec("E9")
@pytest.mark.promise("P7")
@pytest.mark.parametrize("lost", ["store", "store/kv", "store/*"])
def test_a_vhost_without_its_store_is_down_and_not_recreated(tmp_path: Path, lost: str) -> None:
    with_node(tmp_path, fill)
    path = VHostDirectories(tmp_path).path("shop")
    for each in [*path.glob(lost)]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    before = contents(path)

    async def is_down(node: Node) -> None:
        assert node.supervised("shop").state is VHostState.DOWN
        with pytest.raises(VHostDownError, match="is missing or empty; restore it from a backup, or delete the vhost"):
            await node.restart_vhost("shop")
        assert node.vhost("/").is_up
        assert contents(path) == before
        await node.delete_vhost("shop")
        await node.create_vhost("shop")
        assert node.vhost("shop").is_up

    with_node(tmp_path, is_down)


@pytest.mark.spec("E9")
@pytest.mark.promise("P1", "P7")
@pytest.mark.parametrize("lost", ["node", "node/store", "node/store/kv", "node/store/*"])
def test_a_missing_node_store_is_not_mistaken_for_a_new_broker(tmp_path: Path, lost: str) -> None:
    with_node(tmp_path, fill)
    for each in [*tmp_path.glob(lost)]:
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    before = contents(tmp_path)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="restore node/ from a backup, or start once with --recover-vhosts"):
            with_node(tmp_path, nothing)
        assert contents(tmp_path) == before
    with_node(tmp_path, holds_all, recover=True)

    async def works(node: Node) -> None:
        user = await node.users.authenticate("guest", "guest", Peer("127.0.0.1", is_loopback=True))
        node.permissions.check(user, "/", "configure", "anything")
        assert node.vhosts() == list(VHOSTS)

    with_node(tmp_path, works)


@pytest.mark.promise("P7")
@pytest.mark.parametrize("recover", [False, True])
def test_a_store_without_its_current_file_is_repaired_not_replaced(tmp_path: Path, recover: bool) -> None:
    """A repair writes CURRENT again and loses nothing, so no error suggests to delete a vhost or to lose users."""
    with_node(tmp_path, fill)
    vhost, node_store = VHostDirectories(tmp_path).store("shop"), VHostDirectories(tmp_path).node_store
    (vhost / "kv" / "CURRENT").unlink()

    async def is_down(node: Node) -> None:
        with pytest.raises(VHostDownError, match="CURRENT is missing; restore a backup, or run repair"):
            await node.restart_vhost("shop")

    with_node(tmp_path, is_down)
    (node_store / "kv" / "CURRENT").unlink()
    with pytest.raises(CorruptionError, match="CURRENT is missing; restore a backup, or run repair"):
        with_node(tmp_path, nothing, recover=recover)
    for store in (vhost, node_store):
        assert repair(store, reconcile=reconcile_planes).losses == []
    with_node(tmp_path, holds_all)


@pytest.mark.promise("P7")
def test_an_emptied_node_store_moves_nothing_to_quarantine(tmp_path: Path) -> None:
    with_node(tmp_path, fill)

    async def forget_all(node: Node) -> None:
        for each in node._objects():
            node.catalog.delete(each.id)
        await node.durable()

    with_node(tmp_path, forget_all)
    with pytest.raises(CorruptionError, match="--recover-vhosts"):
        with_node(tmp_path, nothing)
    with_node(tmp_path, holds_all, recover=True)


@pytest.mark.promise("P7", "P14")
def test_recovery_creates_an_administrator_only_if_none_exists(tmp_path: Path) -> None:
    """A repair of the node store may lose users and keep virtual hosts."""
    with_node(tmp_path, fill)

    async def forget_users(node: Node) -> None:
        await node.users.create("ann", "secret", tags=["monitoring"])
        await node.users.delete("guest")

    async def nobody_rules(node: Node) -> None:
        assert not any(user.is_administrator for user in node.users.list())

    async def has_guest(node: Node) -> None:
        assert [user.name for user in node.users.list() if user.is_administrator] == ["guest"]
        await holds_all(node)

    async def replace_guest(node: Node) -> None:
        await node.users.set_tags("ann", ["administrator"])
        await node.users.delete("guest")

    async def has_ann_only(node: Node) -> None:
        assert [user.name for user in node.users.list()] == ["ann"]

    with_node(tmp_path, forget_users)
    with_node(tmp_path, nobody_rules)
    with_node(tmp_path, has_guest, recover=True)
    with_node(tmp_path, replace_guest)
    with_node(tmp_path, has_ann_only, recover=True)


@pytest.mark.promise("P7")
def test_a_quarantined_vhost_returns_as_reported(tmp_path: Path) -> None:
    with_node(tmp_path, fill)

    async def forget(node: Node) -> None:
        node.catalog.delete(node._object("shop").id)
        await node.durable()

    lines: list[str] = []

    async def found(node: Node) -> None:
        lines.extend(node.quarantined)
        assert node.vhosts() == ["/"]

    with_node(tmp_path, forget)
    with_node(tmp_path, found)
    [line] = lines
    assert "move it back" in line
    assert "--recover-vhosts" in line
    (tmp_path / "quarantine" / f"{directory_name('shop')}.0").rename(VHostDirectories(tmp_path).path("shop"))
    with_node(tmp_path, holds_all, recover=True)


@pytest.mark.promise("P7")
def test_a_vhost_without_any_name_returns_as_reported(tmp_path: Path) -> None:
    with_node(tmp_path, fill)
    directory = VHostDirectories(tmp_path).path("shop")

    async def forget(node: Node) -> None:
        node.catalog.delete(node._object("shop").id)
        await node.durable()

    async def returns(node: Node) -> None:
        [line] = node.quarantined
        assert f"move it back to {directory} while the broker runs, and create the virtual host by its name" in line
        (tmp_path / "quarantine" / f"{directory.name}.0").rename(directory)
        await node.create_vhost("shop")
        await holds_all(node)

    with_node(tmp_path, forget)
    (directory / NAME_FILE).write_bytes(bytes(20))
    with_node(tmp_path, returns)
    assert read_name(directory) == "shop"


@pytest.mark.spec("E9")
@pytest.mark.parametrize("name", ["letter.txt", ".bashrc", "node/letter.txt", "node/store/letter.txt"])
def test_a_directory_that_is_not_a_brokers_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("dear")
    before = contents(tmp_path)
    for recover in (False, True):
        with pytest.raises(NotAStoreError, match="an empty or new directory") as caught:
            with_node(tmp_path, nothing, recover=recover)
        assert str(tmp_path) in str(caught.value)
        assert Path(name).name in str(caught.value)
    assert contents(tmp_path) == before


def test_files_of_file_systems_and_tools_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".gitkeep").touch()
    with_node(tmp_path, fill)
    (tmp_path / "vhosts" / ".DS_Store").touch()
    (tmp_path / "letter.txt").write_text("beside a broker's data anything may be")

    async def unmoved(node: Node) -> None:
        await holds_all(node)
        assert node.quarantined == []

    with_node(tmp_path, unmoved)
    assert (tmp_path / "vhosts" / ".DS_Store").exists()


@pytest.mark.promise("P7")
def test_an_interrupted_first_start_is_repeated(tmp_path: Path) -> None:
    (tmp_path / "node" / "store").mkdir(parents=True)
    (tmp_path / "node" / "store" / "LOCK").touch()
    (tmp_path / "node" / "store" / "STORE.new").write_bytes(b"half")
    with_node(tmp_path, fill)
    with_node(tmp_path, holds_all)


def test_a_name_file_that_cannot_be_opened_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / NAME_FILE).mkdir()
    with pytest.raises(StorageError, match=r"\.vhost") as caught:
        read_name(tmp_path)
    assert isinstance(caught.value, BasaltError)
