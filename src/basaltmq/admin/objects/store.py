"""Routes for maintenance of a running virtual host's store (SPEC A10).

Operations run in threads, one at a time per virtual host. Without a family they cover all column families.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Access, Call, Route
from basaltmq.admin.http.scope import Scope
from basaltmq.broker.vhost import VHost
from basaltmq.queues.recovery.verify import verify_rows
from basaltmq.store.directory import MARKER
from basaltmq.store.families import Family, family_of
from basaltmq.store.rocks import RocksStore

Result = TypeVar("Result")


class FamilySpec(msgspec.Struct):
    """Body of a request for one column family, or for all."""

    family: str | None = None
    wait: bool = True


class OptionsSpec(msgspec.Struct):
    """RocksDB options to change."""

    options: dict[str, str]
    family: str | None = None


class CheckpointSpec(msgspec.Struct):
    """Target of a backup: a new path below `admin.backup_dir`, relative to it or absolute."""

    target: str


class StoreTools:
    """Handlers of /api/vhosts/{vhost}/store."""

    def __init__(self, scope: Scope, backup_dir: Callable[[], Path]) -> None:
        self._scope = scope
        self._backup_dir = backup_dir
        self._busy: set[str] = set()

    def routes(self) -> list[Route]:
        store = "/api/vhosts/{vhost}/store"
        only = Access.ADMINISTRATOR
        return [
            Route("GET", store, self.diagnostics, "RocksDB statistics, per column family and in total.",
                  Access.MONITORING, query={"family": "One column family (default: all)."}),
            Route("POST", store + "/flush", self.flush, "Flush the memtables to disk.", only, takes=FamilySpec,
                  optional_body=True),
            Route("POST", store + "/compact", self.compact, "Compact the store.", only,
                  takes=FamilySpec, optional_body=True, returns="bytes_before and bytes_after."),
            Route("PUT", store + "/options", self.options, "Change mutable options until the next restart.", only,
                  takes=OptionsSpec),
            Route("POST", store + "/checkpoint", self.checkpoint, "Create an online backup.", only,
                  takes=CheckpointSpec, returns="target: the path of the backup, below admin.backup_dir."),
            Route("POST", store + "/verify", self.verify, "Read and check all data.", only,
                  returns="faults: one line for each damaged file and each damaged or quarantined row of a queue."),
        ]  # fmt: skip

    async def diagnostics(self, call: Call) -> Any:
        vhost, chosen = self._scope.vhost(call), _family(call.query.get("family"))
        store = _managed(vhost)

        def look() -> dict[str, Any]:
            families = [chosen] if chosen is not None else list(Family)
            return {
                "vhost": vhost.name,
                "size_bytes": store.size_bytes(),
                "families": {each.label: store.properties(each) for each in families},
                "total": store.properties(chosen),
            }

        return await asyncio.to_thread(look)

    async def flush(self, call: Call) -> None:
        vhost, family, wait = self._scope.vhost(call), _family(call.body.family), call.body.wait
        await self._alone(vhost, lambda store: store.flush(family, wait=wait))

    async def compact(self, call: Call) -> Any:
        vhost, family = self._scope.vhost(call), _family(call.body.family)

        def work(store: RocksStore) -> dict[str, int]:
            before = store.size_bytes()
            store.compact(family)
            return {"bytes_before": before, "bytes_after": store.size_bytes()}

        return await self._alone(vhost, work)

    async def options(self, call: Call) -> None:
        vhost, family, options = self._scope.vhost(call), _family(call.body.family), call.body.options
        await self._alone(vhost, lambda store: store.set_options(options, family))

    async def checkpoint(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        target = await asyncio.to_thread(_backup_path, self._backup_dir(), call.body.target)
        await self._alone(vhost, lambda _: vhost.streams.backup(target))
        return {"target": str(target)}

    async def verify(self, call: Call) -> Any:
        vhost = self._scope.vhost(call)
        return {"faults": await self._alone(vhost, lambda store: [*store.verify(), *verify_rows(store)])}

    async def _alone(self, vhost: VHost, work: Callable[[RocksStore], Result]) -> Result:
        store = _managed(vhost)
        if vhost.name in self._busy:
            raise HttpError(409, f"another operation is running on the store of vhost {vhost.name!r}; retry later")
        self._busy.add(vhost.name)
        try:
            return await asyncio.to_thread(work, store)
        finally:
            self._busy.discard(vhost.name)


def _backup_path(backup_dir: Path, given: str) -> Path:
    """Return the path of a backup. Raise HttpError 403 unless it is below the backup directory, after symlinks."""
    root = backup_dir.resolve()
    target = root / given
    if given.isprintable() and ".." not in Path(given).parts:
        parent = target.parent.resolve()
        if parent.is_relative_to(root) and target != root:
            for each in (parent, *parent.parents):
                if each.is_relative_to(root) and (each / MARKER).exists():
                    raise HttpError(403, f"backup target {given[:200]!r} is inside the backup {each}; use another name")
            return parent / target.name
    raise HttpError(
        403,
        f"backup target {given[:200]!r} is not below {root}; use a name without '..', or set admin.backup_dir to "
        "another directory and reload",
    )


def _managed(vhost: VHost) -> RocksStore:
    if not isinstance(vhost.store, RocksStore):
        raise HttpError(400, f"vhost {vhost.name!r} is in memory and has no store on disk")
    return vhost.store


def _family(name: str | None) -> Family | None:
    return None if name is None else family_of(name)
