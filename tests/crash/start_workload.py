"""Starts of a broker with several virtual hosts, each in a fresh process (SPEC E9).

Virtual hosts open in parallel threads. Whatever is built lazily on first use is therefore built by several threads at
once, and only the first start of a process does it. So each start is a fork of a process that imported everything and
opened nothing. A tiny switch interval makes threads change places in the middle of such work.

    python -m tests.crash.start_workload make <directory> <vhosts>
    python -m tests.crash.start_workload run <directory> <starts>     one line of JSON: {"starts": n, "failed": [...]}
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from pathlib import Path

from basaltmq.broker.config.settings import Config
from basaltmq.broker.node import Node
from basaltmq.broker.routing.policy import Policy
from basaltmq.streams.topics import TopicConfig

SWITCH_INTERVAL_S = 1e-6
START_S_MAX = 60
"""Timeout of a start, which takes well under a second."""


async def make(path: Path, vhosts: int) -> None:
    """Create a directory whose virtual hosts have every kind of data that a start reads."""
    node = await Node.open(Config(data_dir=path))
    try:
        for number in range(vhosts - 1):
            await node.create_vhost(f"v{number}")
        for name in node.vhosts():
            vhost = node.vhost(name)
            vhost.declare_queue("work", durable=True)
            vhost.declare_queue("audit", durable=True, arguments={"x-queue-type": "stream"})
            vhost.streams.plane.topics.create("metrics", TopicConfig(partitions=4))
            vhost.policies.set(Policy("short", "^work", {"message-ttl": 60_000}))
    finally:
        await node.close()


async def start(path: Path) -> None:
    """Open all virtual hosts. Raises if one does not serve."""
    node = await Node.open(Config(data_dir=path))
    try:
        for name in node.vhosts():
            vhost = node.vhost(name)
            assert vhost.streams.plane.topics.get("metrics").config.partitions == 4
            assert set(vhost.queues.by_name) == {"work", "audit"}
    finally:
        await node.close()


def start_in_child(path: Path) -> str | None:
    """Return the error, if any."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(START_S_MAX)
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            asyncio.run(start(path))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def run(path: Path, starts: int) -> None:
    failed = [found for _ in range(starts) if (found := start_in_child(path)) is not None]
    print(json.dumps({"starts": starts, "failed": failed}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        asyncio.run(make(Path(sys.argv[2]), int(sys.argv[3])))
    else:
        run(Path(sys.argv[2]), int(sys.argv[3]))
