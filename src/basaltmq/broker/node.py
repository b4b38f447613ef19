"""A broker node: virtual hosts with their supervision, users, permissions and alarms.

The node store holds a catalog of virtual hosts and users. Each virtual host has its own store (vhost_directory.py). All
stores share one block cache and one write buffer budget.

    vhost   name   ->   {"state": "new" | "ready" | "deleting", "description", "tags"}

The catalog row is written before the directory is created, and deleted after the directory is removed. After a crash in
between, opening the node completes the operation: it creates or removes the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from basaltmq.broker.auth.node_secret import node_secret
from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.users import ADMINISTRATOR, Users
from basaltmq.broker.config.settings import Config
from basaltmq.broker.connections import Connections
from basaltmq.broker.object_limits import MAX_QUEUES, ObjectLimits
from basaltmq.broker.resources.flow import Alarms, Listener, Watch
from basaltmq.broker.resources.memory_limit import memory_bytes
from basaltmq.broker.resources.reclaiming import Reclaiming
from basaltmq.broker.scheduling.loop_shares import LoopShares
from basaltmq.broker.supervision import Supervised, SupervisedStore, VHostState
from basaltmq.broker.vhost import VHost
from basaltmq.broker.vhost_directory import SECRET_FILE, VHostDirectories
from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.commits import Commits
from basaltmq.catalog.kinds import Kind
from basaltmq.catalog.objects import CatalogObject
from basaltmq.catalog.record import ROOT
from basaltmq.errors import AlreadyExistsError, BasaltError, DiskFullError, InvalidArgumentError, VHostNotFoundError
from basaltmq.queues.ready.budget import MemoryBudget
from basaltmq.queues.scripts.budget import ScriptBudget
from basaltmq.store.open import open_store
from basaltmq.store.options import SharedMemory, StoreOptions
from basaltmq.store.rocks import RocksStore
from basaltmq.store.space.free_space import disk_bytes, free_bytes
from basaltmq.store.space.reserve import Reserve
from basaltmq.store.space.size import SizeGuard
from basaltmq.store.sync.loop_commit import LoopCommit

DEFAULT_VHOST: Final = "/"
VHOST_NAME_BYTES_MAX: Final = 255

STALL_WAIT_MS: Final = 5
"""Maximum time that a write blocks the loop while the store is stalled. After it, publishers are blocked."""

MEASURE_INTERVAL_S: Final = 0.1
"""Interval between size measurements of a store with a limit. The log can exceed it by one interval's appends."""

UNDERFULL: Final = 0.9
"""Fraction of the size limit below which a store's publishers are unblocked."""

_NEW: Final = "new"
_READY: Final = "ready"
_DELETING: Final = "deleting"
_log: Final = logging.getLogger(__name__)


class Node:
    """An open broker node. Create it with `open`."""

    def __init__(self, config: Config, store: RocksStore, memory: SharedMemory) -> None:
        self.config = config
        self.directories = VHostDirectories(config.data_dir)
        self.alarms = Alarms()
        self.connections = Connections()
        self.shares = LoopShares()
        self.is_new = False
        self.quarantined: list[str] = []
        """One line per directory that belongs to no virtual host and was quarantined at open."""
        self.started_s = time.time()
        self.stop_requested: asyncio.Event = asyncio.Event()
        """Set when a virtual host stays down and `vhosts.on_failure` is `stop_node`: the node must stop."""
        self._store = store
        self._memory = memory
        self._budget = MemoryBudget()
        self._script_budget = ScriptBudget()
        self._commit = LoopCommit(store)
        self.catalog = Catalog(store, Commits(store, self._commit))
        self.users = Users(
            self.catalog,
            self.durable,
            loopback_only=lambda: self.config.auth.loopback_users,
            anonymous_name=lambda: self.config.auth.anonymous_user,
            secret=node_secret(self.directories.node_store.with_name(SECRET_FILE)),
        )
        self.permissions = Permissions(self.catalog, self.durable)
        self.limits = ObjectLimits(self.catalog, self.durable, self.connections)
        self.users.changed = self._user_changed
        self._vhosts: dict[str, Supervised] = {}
        self._watch = Watch(
            self.alarms,
            config.data_dir,
            free_min_bytes=lambda: self.config.disk.free_min.of(disk_bytes(self.config.data_dir)),
            resident_max_bytes=lambda: self.config.memory.high_watermark.of(memory_bytes()),
            reserve=Reserve(config.data_dir, config.disk.reserve),
        )
        self._reclaiming = Reclaiming(self._watch.space, lambda: free_bytes(config.data_dir))
        self._own_store = SupervisedStore(
            store,
            restarts_max=config.vhosts.restarts_max,
            window_s=config.vhosts.restart_window_s,
            disk_full=self._met_full_disk,
            reopened=self._store_reopened,
        )
        self._watching: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def open(cls, config: Config, *, recover_vhosts: bool = False) -> Node:
        """Open the data directory and all its virtual hosts. One that cannot be opened does not affect the others.

        Raises, and changes nothing, if the directory is not a broker's or lost its node store. `recover_vhosts` adds
        virtual hosts that have a directory but no catalog row. It also creates the default user if no administrator
        is left.
        """
        memory = SharedMemory(config.memory.cache_bytes, config.memory.write_buffer_bytes)
        directories = VHostDirectories(config.data_dir)
        await asyncio.to_thread(directories.require_ours, recover=recover_vhosts)
        if recover_vhosts:
            await asyncio.to_thread(directories.move_lost_node_aside)
        options = StoreOptions(memory=memory)
        open_node = partial(open_store, directories.node_store, options=options)
        try:
            store = await asyncio.to_thread(open_node)
        except DiskFullError:
            if not Reserve(config.data_dir).release():
                raise
            _log.warning("disk full: released the reserve file of %s to start", config.data_dir)
            store = await asyncio.to_thread(open_node)
        node = cls(config, store, memory)
        try:
            await node._start(recover_vhosts)
        except BaseException:
            await node.close()
            raise
        return node

    async def _start(self, recover_vhosts: bool) -> None:
        self.is_new = self.catalog.open()
        await self._finish_deletions()
        is_empty = not self._objects()
        if recover_vhosts:
            await self._adopt()
        elif is_empty and self.directories.has_any():
            # The catalog is empty. Continuing would quarantine every virtual host.
            raise self.directories.node_lost()
        has_administrator = any(user.is_administrator for user in self.users.list())
        if self.is_new or (recover_vhosts and (is_empty or not has_administrator)):
            await self._populate()
        names = [each.name for each in self._objects()]
        self.quarantined = self.directories.quarantine_unknown(names)
        for line in self.quarantined:
            _log.error("quarantined: %s", line)
        self._look()
        await asyncio.gather(*(self._begin(name) for name in names))

    async def _populate(self) -> None:
        """Create the default virtual host and the default user where they are missing."""
        if self.catalog.find(Kind.VHOST, DEFAULT_VHOST) is None:
            attributes = {"state": _NEW, "description": "Default virtual host"}
            self.catalog.create(Kind.VHOST, DEFAULT_VHOST, attributes=attributes)
        auth = self.config.auth
        if auth.default_user and self.catalog.find(Kind.USER, auth.default_user) is None:
            await self.users.create(auth.default_user, auth.default_password, tags=[ADMINISTRATOR])
            await self.permissions.set(auth.default_user, DEFAULT_VHOST, configure=".*", write=".*", read=".*")
        await self.durable()

    async def _adopt(self) -> None:
        """Add virtual hosts to the catalog that have only a directory."""
        known = {each.name for each in self._objects()}
        for name in self.directories.names():
            if name not in known:
                attributes = {"state": _READY, "description": "Recovered from its directory"}
                self.catalog.create(Kind.VHOST, name, attributes=attributes)
                _log.warning("vhost %r was recovered from %s", name, self.directories.path(name))
        await self.durable()

    async def _finish_deletions(self) -> None:
        for each in list(self._objects()):
            if each.attributes.get("state") == _DELETING:
                await self._remove(each)

    def _objects(self) -> list[CatalogObject]:
        return list(self.catalog.children(ROOT, Kind.VHOST))

    async def durable(self) -> None:
        """Wait until all writes to the node's catalog are durable."""
        await self._commit.durable()

    def vhost(self, name: str) -> VHost:
        """Return the virtual host of this name, or raise if it is not running."""
        return self.supervised(name).vhost()

    def supervised(self, name: str) -> Supervised:
        found = self._vhosts.get(name)
        if found is None:
            raise VHostNotFoundError(f"vhost '{name}' not found")
        return found

    def vhosts(self) -> list[str]:
        return sorted(self._vhosts)

    def describe_vhost(self, name: str) -> dict[str, Any]:
        """Return the catalog attributes and the current state of a virtual host."""
        supervised = self.supervised(name)
        found = self._object(name)
        return {
            "name": name,
            "description": found.attributes.get("description", ""),
            "tags": found.attributes.get("tags", []),
            "state": supervised.state.value,
            "restarts": supervised.restarts,
            "error": None if supervised.error is None else str(supervised.error),
            "directory": str(self.directories.path(name)),
        }

    async def create_vhost(self, name: str, *, description: str = "", tags: tuple[str, ...] = ()) -> None:
        """Create a virtual host, durably, and start it. Raises VHostDownError if it was created but does not run."""
        if not name or len(name.encode(errors="replace")) > VHOST_NAME_BYTES_MAX:
            raise InvalidArgumentError(f"invalid vhost name: it must have 1 to {VHOST_NAME_BYTES_MAX} bytes")
        if name in self._vhosts:
            raise AlreadyExistsError(f"vhost {name!r} already exists")
        attributes = {"state": _NEW, "description": description, "tags": list(tags)}
        self.catalog.create(Kind.VHOST, name, attributes=attributes)
        await self.durable()
        await self._begin(name)
        await self._vhosts[name].require_running()

    async def delete_vhost(self, name: str) -> None:
        """Close the connections of a virtual host and delete it with all its data."""
        supervised = self.supervised(name)
        found = self._object(name)
        self.catalog.update(found.id, {**found.attributes, "state": _DELETING})
        await self.durable()
        del self._vhosts[name]
        self.connections.close_all(f"vhost '{name}' was deleted", vhost=name)
        await supervised.stop()
        await self._remove(found)

    async def _remove(self, found: CatalogObject) -> None:
        await asyncio.to_thread(self.directories.remove, found.name)
        await self.permissions.forget_vhost(found.name)
        self.catalog.delete(found.id)
        await self.durable()

    async def start_vhost(self, name: str) -> None:
        """Start a virtual host that is down. Raises VHostDownError if it does not run afterwards."""
        await self.supervised(name).start_by_hand()

    async def restart_vhost(self, name: str) -> None:
        """Close a virtual host's connections and reopen it. Raises VHostDownError if it does not run afterwards."""
        supervised = self.supervised(name)
        self.connections.close_all(f"vhost '{name}' is restarting; connect again", vhost=name)
        await supervised.restart_by_hand()

    def on_blocked(self, callback: Listener, vhost: str | None = None) -> Callable[[], None]:
        """Call `callback` with the reason when publishers become blocked, and with None when they are unblocked.

        `vhost` restricts it to alarms that affect that virtual host. Returns a function that unregisters the callback.
        """
        return self.alarms.listen(callback, vhost)

    def reconfigure(self, config: Config) -> None:
        """Use a new configuration. The caller has kept the old values of settings that require a restart."""
        self.config = config

    async def close(self) -> None:
        """Close every virtual host cleanly, then the node store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        await self._reclaiming.close()
        await self._own_store.close()
        done = await asyncio.gather(*(each.stop() for each in self._vhosts.values()), return_exceptions=True)
        for error in done:
            if isinstance(error, BaseException):
                _log.error("a vhost did not close cleanly: %s", error)
        self.catalog.close()
        await asyncio.to_thread(self._close_store)

    def _close_store(self) -> None:
        with contextlib.suppress(BasaltError):
            self._commit.close()
        self._store.close()

    async def _begin(self, name: str) -> None:
        supervised = self._vhosts[name] = Supervised(
            name,
            partial(self._open_vhost, name),
            _close_vhost_store,
            restarts_max=self.config.vhosts.restarts_max,
            window_s=self.config.vhosts.restart_window_s,
            gave_up=self._gave_up,
            changed=self._changed,
            disk_full=lambda _: self._met_full_disk(),
        )
        await supervised.start()

    async def _open_vhost(self, name: str) -> VHost:
        is_new = self._object(name).attributes.get("state") == _NEW
        path = await asyncio.to_thread(self.directories.make if is_new else self.directories.check, name)
        options = StoreOptions(memory=self._memory, stall_wait_ms_max=STALL_WAIT_MS)

        def open_it() -> VHost:
            store = open_store(path, create=is_new, options=options)
            try:
                return VHost(
                    name,
                    store,
                    path=path,
                    budget=self._budget,
                    script_budget=self._script_budget,
                    event_sample=self.config.events.sample,
                )
            except BaseException:
                store.close()
                raise

        vhost = await asyncio.to_thread(open_it)
        if is_new:
            try:
                await self._made(name)
            except BaseException:
                await vhost.close()
                await _close_vhost_store(vhost)
                raise
        vhost.queues.count_max = lambda: self.limits.of(Kind.VHOST, name).get(MAX_QUEUES)
        self._guard_size(vhost)
        vhost.tick.on_stalled = lambda stalled: self.alarms.set(
            "store", f"the store of vhost '{name}' is stalled by compaction" if stalled else None, name
        )
        return vhost

    async def _made(self, name: str) -> None:
        """Record that the store of a new virtual host exists. From now on a missing store is an error."""
        found = self._object(name)
        if found.attributes.get("state") == _NEW:
            self.catalog.update(found.id, {**found.attributes, "state": _READY})
            await self.durable()

    def _guard_size(self, vhost: VHost) -> None:
        """Block the publishers of a virtual host while its store exceeds its size limit (SPEC A11)."""
        size_max = self.config.disk.vhost_max
        if not size_max:
            return
        assert isinstance(vhost.store, RocksStore), "opened by open_store"
        loop = asyncio.get_running_loop()
        name = vhost.name

        def changed(overfull: bool, size_bytes: int) -> None:
            text = (
                f"the store of vhost '{name}' holds {size_bytes} bytes, its limit is {size_max}" if overfull else None
            )
            with contextlib.suppress(RuntimeError):
                # The loop may be closed. Then there are no publishers.
                loop.call_soon_threadsafe(self.alarms.set, "size", text, name)

        guard = SizeGuard(
            vhost.store, overfull_bytes=size_max, underfull_bytes=int(size_max * UNDERFULL), log=vhost.streams
        )
        vhost.size_guard = guard
        guard.listen(changed)

        def measure() -> None:
            """Measure periodically, because appends to the log do not notify the size guard."""
            if vhost.is_up:
                with contextlib.suppress(BasaltError):
                    guard.measure()
                loop.call_later(MEASURE_INTERVAL_S, measure)

        measure()

    def _object(self, name: str) -> CatalogObject:
        found = self.catalog.find(Kind.VHOST, name)
        if found is None:
            raise VHostNotFoundError(f"vhost '{name}' not found")
        return found

    def _changed(self, supervised: Supervised) -> None:
        _log.info("vhost %r is %s", supervised.name, supervised.state)
        if supervised.state is not VHostState.RUNNING:
            for alarm in ("store", "size"):
                self.alarms.set(alarm, None, supervised.name)

    def _gave_up(self, supervised: Supervised) -> None:
        if self.config.vhosts.on_failure == "stop_node":
            _log.error('vhost %r stays down; stopping the node (vhosts.on_failure = "stop_node")', supervised.name)
            self.stop_requested.set()

    def _met_full_disk(self) -> None:
        """Release the disk reserve, and block publishers until there is enough free space."""
        self._watch.space.on_disk_full()
        self._watch.look()

    def _store_reopened(self) -> None:
        """Read again what was cached: rows whose sync failed may be gone."""
        self.catalog.close()
        self.catalog.open()
        self.permissions.forget()

    def _user_changed(self, name: str) -> None:
        self.permissions.forget()

    def _look(self) -> None:
        self._watch.look()
        running = [each.vhost() for each in self._vhosts.values() if each.state is VHostState.RUNNING]
        self._reclaiming.step(running)
        self._own_store.step()
        self._watching = asyncio.get_running_loop().call_later(self._watch.interval_s, self._look)

    @property
    def free_bytes(self) -> int:
        return self._watch.space.free_bytes

    @property
    def resident_bytes(self) -> int:
        return self._watch.resident_bytes


async def _close_vhost_store(vhost: VHost) -> None:
    await asyncio.to_thread(vhost.store.close)
