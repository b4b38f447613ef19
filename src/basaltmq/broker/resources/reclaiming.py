"""Space reclamation while the disk alarm is on: in one thread, one virtual host after another, at a bounded rate.

Acknowledging messages frees no disk space by itself (see `store/space/reclaim.py`), so without reclamation the alarm
would never clear.

This module also detects failed background jobs of RocksDB. After a flush or compaction fails on a full disk, RocksDB
compacts nothing until the store is reopened, and reports it nowhere else. The virtual host is then restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final
from weakref import WeakKeyDictionary

from basaltmq.broker.vhost import VHost
from basaltmq.errors import BasaltError, DiskFullError, StorageError, StoreClosedError
from basaltmq.store.rocks import RocksStore
from basaltmq.store.space.free_space import FreeSpace
from basaltmq.store.space.reclaim import Reclaimer

_log: Final = logging.getLogger(__name__)


class Reclaiming:
    """Reclaims the disk space of a node. Call it on the node's loop."""

    def __init__(self, space: FreeSpace, free_bytes: Callable[[], int]) -> None:
        self._space = space
        self._free_bytes = free_bytes
        self._reclaimers: WeakKeyDictionary[VHost, Reclaimer] = WeakKeyDictionary()
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def step(self, vhosts: Iterable[VHost]) -> None:
        """Fail virtual hosts with RocksDB background errors, and reclaim space while the disk is low."""
        running = [vhost for vhost in vhosts if isinstance(vhost.store, RocksStore)]
        for vhost in running:
            self._check(vhost)
        if self._space.is_low and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._reclaim(running))

    async def close(self) -> None:
        """Wait for the current step. A compaction stops after its column family."""
        self._closing = True
        if self._task is not None:
            await asyncio.wait([self._task])

    def _check(self, vhost: VHost) -> None:
        assert isinstance(vhost.store, RocksStore), "chosen by step"
        try:
            failed = vhost.store.background_errors()
        except BasaltError:
            # Closed or poisoned. Its users report that.
            return
        if failed and vhost.error is None:
            text = f"a flush or compaction of the store of vhost '{vhost.name}' failed; see {vhost.store.path}/kv/LOG"
            vhost.fail(DiskFullError(f"no space left: {text}") if self._space.is_low else StorageError(text))

    async def _reclaim(self, vhosts: list[VHost]) -> None:
        for vhost in vhosts:
            if self._is_enough():
                return
            if not vhost.is_up:
                continue
            assert isinstance(vhost.store, RocksStore), "chosen by step"
            reclaimer = self._reclaimers.get(vhost)
            if reclaimer is None:
                reclaimer = self._reclaimers[vhost] = Reclaimer(vhost.store, vhost.streams)
            try:
                if await asyncio.to_thread(reclaimer.step, self._is_enough, self._free_bytes):
                    _log.info("reclaimed space of vhost %r: %d bytes free", vhost.name, self._free_bytes())
            except StoreClosedError:
                continue
            except StorageError as error:
                vhost.fail(error)
            except Exception:
                _log.exception("cannot reclaim space of vhost %r", vhost.name)

    def _is_enough(self) -> bool:
        return self._closing or self._space.has_room()
