"""RocketMQ as a peer: a name server, and a proxy with the broker in its process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bench.side_by_side.process import Side, free_port, running

NAMES_MEMORY: Final = ("-Xms256m", "-Xmx256m")
BROKER_MEMORY: Final = ("-Xms1g", "-Xmx2g", "-XX:MaxDirectMemorySize=2g")
BROKER: Final = """\
brokerClusterName=DefaultCluster
brokerName=bench
brokerId=0
brokerIP1=127.0.0.1
namesrvAddr={names}
listenPort={broker}
haListenPort={ha}
storePathRootDir={data}
storePathCommitLog={data}/commitlog
mappedFileSizeCommitLog=268435456
flushDiskType={flush}
"""


class RocketmqPeer(NamedTuple):
    """A RocketMQ that runs, with the addresses that its admin tool needs."""

    side: Side
    java: list[str]
    environment: dict[str, str]
    names: str
    broker: str

    def create(self, topic: str, partitions: int, *, is_ordered: bool) -> None:
        """Create a topic and the group of the load."""
        kind = ["-a", "+message.type=FIFO"] if is_ordered else []
        count = str(partitions)
        self._admin("updateTopic", "-t", topic, "-r", count, "-w", count, *kind)
        self._admin("updateSubGroup", "-g", f"group-{topic}", *(["-o", "true"] if is_ordered else []))

    def _admin(self, command: str, *options: str) -> None:
        place = ["-n", self.names, "-b", self.broker]
        program = [*self.java, "org.apache.rocketmq.tools.command.MQAdminStartup", command, *place, *options]
        subprocess.run(program, env=self.environment, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def started(jars: Path, folder: Path, name: str, flush: str) -> Iterator[RocketmqPeer]:
    home = folder / "home"
    (home / "conf").mkdir(parents=True)
    names_port, port, broker_port = free_port(), free_port(), free_port()
    names, broker = f"127.0.0.1:{names_port}", f"127.0.0.1:{broker_port}"
    (folder / "names.conf").write_text(f"listenPort={names_port}\n")
    settings = folder / "broker.conf"
    settings.write_text(
        BROKER.format(names=names, broker=broker_port, ha=free_port(), data=folder / "data", flush=flush)
    )
    proxy = {
        "rocketMQClusterName": "DefaultCluster",
        "grpcServerPort": port,
        "remotingListenPort": free_port(),
        "namesrvAddr": names,
        "proxyMode": "local",
    }
    (folder / "proxy.json").write_text(json.dumps(proxy))
    environment = {**os.environ, "ROCKETMQ_HOME": str(home), "RMQ_PROXY_HOME": str(home)}
    java = ["java", f"-Duser.home={home}", "-cp", f"{jars}/*"]
    names_server = [*java[:2], *NAMES_MEMORY, *java[2:], "org.apache.rocketmq.namesrv.NamesrvStartup"]
    server = [
        *java[:2],
        *BROKER_MEMORY,
        *java[2:],
        "org.apache.rocketmq.proxy.ProxyStartup",
        "-pm",
        "local",
        "-n",
        names,
    ]
    with (
        running(f"{name} names", [*names_server, "-c", str(folder / "names.conf")], folder, names_port, environment),
        running(
            name, [*server, "-bc", str(settings), "-pc", str(folder / "proxy.json")], folder, port, environment
        ) as side,
    ):
        yield RocketmqPeer(side, java, environment, names, broker)
