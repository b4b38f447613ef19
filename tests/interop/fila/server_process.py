"""A gRPC server in a separate process: one virtual host, without the rest of the broker.

    python server_process.py DIRECTORY [JSON of QueueServerOptions]

It prints its port when it listens, and serves until it is stopped or killed.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from basaltmq.broker.auth.permissions import Permissions
from basaltmq.broker.auth.users import ADMINISTRATOR, Users
from basaltmq.broker.resources.flow import Alarms
from basaltmq.broker.vhost import VHost
from basaltmq.catalog.catalog import Catalog
from basaltmq.cli.server.command import SWITCH_S
from basaltmq.protocols.grpc.services.access import Accounts
from basaltmq.protocols.grpc.services.api_keys import ApiKeys
from basaltmq.protocols.grpc.services.queue_server import QueueServer, QueueServerOptions, TlsFiles
from basaltmq.store.open import open_store


async def at_once() -> None:
    """Return at once, because no test simulates a power loss."""


async def guest_accounts(catalog: Catalog) -> Accounts:
    """Create the users of a new broker: guest, an administrator with all permissions, who is also the anonymous
    user."""
    is_new = catalog.open()
    users = Users(catalog, at_once, anonymous_name=lambda: "guest")
    permissions = Permissions(catalog, at_once)
    users.changed = lambda name: permissions.forget()
    if is_new:
        await users.create("guest", "guest", tags=[ADMINISTRATOR])
        await permissions.set("guest", "/", configure=".*", write=".*", read=".*")
    return Accounts(users, permissions, "/")


async def serve(directory: Path, options: QueueServerOptions) -> None:
    node_store = open_store(directory.with_name(f"{directory.name}-node"))
    catalog = Catalog(node_store)
    accounts = await guest_accounts(catalog)
    vhost = VHost("/", open_store(directory), path=directory)
    vhost.start()
    server = QueueServer(vhost, Alarms(), ApiKeys(vhost.store), accounts, options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(await server.start(), flush=True)
    # `basalt serve` does the same once it is ready.
    gc.freeze()
    await stop.wait()
    await server.stop(1.0)
    await vhost.close()
    vhost.store.close()
    catalog.close()
    node_store.close()


def options_of(text: str) -> QueueServerOptions:
    given = json.loads(text)
    tls = given.pop("tls", None)
    paths: dict[str, Any] = {name: Path(path) for name, path in (tls or {}).items()}
    files = None if tls is None else TlsFiles(**paths)
    return QueueServerOptions(tls=files, **({"port": 0} | given))


if __name__ == "__main__":
    # `basalt serve` does the same.
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
