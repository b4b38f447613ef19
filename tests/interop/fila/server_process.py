"""A gRPC server in a process of its own: a store, a queue plane and nothing else of the broker.

    python server_process.py DIRECTORY [JSON of QueueServerOptions]

Prints its port when it listens, and serves until it is told to stop or is killed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import uvloop

from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.users import ADMINISTRATOR, Users
from basaltmq.catalog.catalog import Catalog
from basaltmq.cli.server.command import SWITCH_S
from basaltmq.protocols.grpc.services.access import Accounts
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.queue_server import QueueServer, QueueServerOptions, TlsFiles
from basaltmq.queues.plane import QueuePlane
from basaltmq.store.open import open_store
from basaltmq.store.sync.loop_commit import LoopCommit

CLOCK_LOOK_S = 1.0


async def keep_time(plane: QueuePlane, closer: asyncio.Event) -> None:
    """Do what is due in queues, when it is."""
    while True:
        closer.clear()
        deadline_ns = plane.run_due()
        wait_s = None if deadline_ns is None else min(max((deadline_ns - time.time_ns()) / 1e9, 0.0), CLOCK_LOOK_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await closer.wait()


class PlaneOwner:
    """A queue plane without a broker."""

    def __init__(self, plane: QueuePlane) -> None:
        self.create = plane.create
        self.delete = plane.delete

    def check(self, name: str) -> None:
        """All queues may be used."""

    def require_room(self) -> None:
        """Publishers are never blocked."""

    def failed(self, error: Exception) -> None:
        """Errors need no handling."""


async def at_once() -> None:
    """Nothing here outlives a power loss."""


async def guest_accounts(catalog: Catalog) -> Accounts:
    """Users as a new broker has them: guest, an administrator with all permissions, who is the anonymous user too."""
    is_new = catalog.open()
    users = Users(catalog, at_once, anonymous_name=lambda: "guest")
    permissions = Permissions(catalog, at_once)
    users.changed = lambda name: permissions.forget()
    if is_new:
        await users.create("guest", "guest", tags=[ADMINISTRATOR])
        await permissions.set("guest", "/", configure=".*", write=".*", read=".*")
    return Accounts(users, permissions, "/")


async def serve(directory: Path, options: QueueServerOptions) -> None:
    store = open_store(directory)
    commit = LoopCommit(store)
    closer = asyncio.Event()
    plane = QueuePlane(store, commit, on_deadline=closer.set)
    catalog = Catalog(store)
    accounts = await guest_accounts(catalog)
    server = QueueServer(plane, commit, ApiKeys(store), accounts, options, owner=PlaneOwner(plane))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    timer = asyncio.create_task(keep_time(plane, closer))
    print(await server.start(), flush=True)
    # As `basalt serve` does once it is ready.
    gc.freeze()
    await stop.wait()
    await server.stop(1.0)
    timer.cancel()
    plane.close()
    catalog.close()
    commit.close()
    store.close()


def options_of(text: str) -> QueueServerOptions:
    given = json.loads(text)
    tls = given.pop("tls", None)
    paths: dict[str, Any] = {name: Path(path) for name, path in (tls or {}).items()}
    files = None if tls is None else TlsFiles(**paths)
    return QueueServerOptions(tls=files, **({"port": 0} | given))


if __name__ == "__main__":
    # As `basalt serve` does.
    sys.setswitchinterval(SWITCH_S)
    profile = os.environ.get("BASALT_PROFILE")
    work = serve(Path(sys.argv[1]), options_of(sys.argv[2] if len(sys.argv) > 2 else "{}"))
    if profile:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(asyncio.run, work)
        profiler.dump_stats(profile)
    else:
        uvloop.run(work)
