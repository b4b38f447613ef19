"""The checker: drains everything a broker holds and compares it with the ledger.

queues      every confirmed message exists once, unless an ack was sent; in the order of its producer
dead        a rejected message is in its queue or in the dead-letter queue
streams     offsets are dense; every confirmed record exists once, in the order of its producer
rules       every confirmed message was copied to the stream
groups      confirmed commits exist
store       `store verify` and the audit of rows find nothing
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

from tests.interop.server import ROOT, Broker
from tests.soak import amqp, embedded, grpc_queues, kafka, mqtt, rocketmq
from tests.soak.ledger import Label, Ledger, Place, check_order

from basaltmq.pipeline.audit.store import audit_rows
from basaltmq.pipeline.findings import Severity
from basaltmq.streams.view import StreamView

DRAIN_S = 300.0
"""Timeout for one queue or topic."""

COMMAND_S = 600.0
"""Timeout of a `basalt` command."""

Missing: TypeAlias = dict[Place, list[Label]]


def vhost_of(place: Place) -> str:
    """Return the virtual host of a place. All protocols but AMQP 0-9-1 use the default one."""
    first = place.split("|", 1)[0]
    return "/" if first in ("kafka", "mqtt", "rule", "grpc", "rocketmq") else first


def basalt(*arguments: str) -> tuple[int, str]:
    """Run a command. Return its exit code and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BASALT_")}
    done = subprocess.run(
        [sys.executable, "-m", "basaltmq.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=COMMAND_S,
        check=False,
        env={**environment, "PYTHONPATH": str(ROOT / "src")},
    )
    return done.returncode, done.stdout.decode(errors="replace")


def stores_of(data: Path) -> list[Path]:
    """Return all stores in a broker's data directory."""
    return [data / "node" / "store", *sorted((data / "vhosts").glob("*/store"))]


def check_stores(stores: list[Path], ledger: Ledger) -> None:
    """Verify stores that no process has open. Findings are problems."""
    for store in stores:
        code, said = basalt("--data-dir", str(store), "store", "verify")
        if code:
            ledger.problem(f"store verify of {store} ends with {code}: {said[-500:]}")
            continue
        with StreamView.open(store) as view:
            for finding in audit_rows(store, view):
                if finding.severity is not Severity.NOTE:
                    ledger.problem(f"audit of {store}: {finding.kind} of {finding.subject}: {finding.detail}")


def check_audit(data: Path, vhosts: tuple[str, ...], ledger: Ledger) -> None:
    """Run the whole audit, which counts records with Spark."""
    for vhost in vhosts:
        code, said = basalt("pipeline", "audit", "--data-dir", str(data), "--vhost", vhost)
        if code:
            ledger.problem(f"pipeline audit of {vhost} ends with {code}: {said[-500:]}")


def check_broker(broker: Broker, ledger: Ledger, vhosts: tuple[str, ...]) -> Missing:
    """Drain a running broker. Return missing confirmed messages by place.

    Virtual hosts and protocols are drained in parallel, because most of the time is waiting.
    """
    tasks: list[Callable[[], Missing]] = [partial(_check_amqp, broker, ledger, vhost) for vhost in vhosts]
    if "/" in vhosts:
        tasks += [partial(_check_kafka, broker, ledger), partial(_check_grpc, broker, ledger)]
        tasks += [partial(_check_mqtt, broker, ledger), partial(_check_rocketmq, broker, ledger)]
    missing: Missing = {}
    with ThreadPoolExecutor(len(tasks) or 1, "soak-drain") as pool:
        for found in [pool.submit(task) for task in tasks]:
            missing |= found.result()
    ledger.check_groups({place for place in ledger.places() if vhost_of(place) in vhosts})
    return {place: labels for place, labels in missing.items() if labels}


def _check_amqp(broker: Broker, ledger: Ledger, vhost: str) -> Missing:
    found: dict[Place, list[Label]] = {}
    queues = (*amqp.QUEUES, amqp.LINKS)
    for queue in (*queues, amqp.DEAD):
        drained = amqp.drain(broker, vhost, queue, DRAIN_S)
        if queue != amqp.DEAD:
            check_order(ledger, f"{vhost}|{queue}", [label for _, label in drained])
        for place, label in drained:
            found.setdefault(place, []).append(label)
    missing = {}
    for queue in queues:
        place = f"{vhost}|{queue}"
        missing[place] = ledger.compare(place, found.get(place, []))
    place = f"{vhost}|{amqp.STREAM}"
    missing[place] = check_stream(ledger, place, amqp.read_stream(broker, vhost, DRAIN_S))
    return missing


def _check_grpc(broker: Broker, ledger: Ledger) -> Missing:
    return {grpc_queues.PLACE: ledger.compare(grpc_queues.PLACE, grpc_queues.drain(broker, DRAIN_S))}


def _check_mqtt(broker: Broker, ledger: Ledger) -> Missing:
    return {mqtt.PLACE: ledger.compare(mqtt.PLACE, mqtt.drain(broker, DRAIN_S))}


def _check_rocketmq(broker: Broker, ledger: Ledger) -> Missing:
    return {rocketmq.PLACE: ledger.compare(rocketmq.PLACE, rocketmq.drain(broker, DRAIN_S))}


def check_rule(broker: Broker, ledger: Ledger) -> Missing:
    """Check the copies of a rule. A crash may duplicate some but loses none."""
    labels = dict.fromkeys(mqtt.read_stream(broker, DRAIN_S))
    missing = ledger.compare(mqtt.STREAM_PLACE, labels, destructive=False)
    return {mqtt.STREAM_PLACE: missing} if missing else {}


def _check_kafka(broker: Broker, ledger: Ledger) -> Missing:
    missing: Missing = {}
    kafka.check_commits(broker, ledger)
    for topic, partitions in kafka.PARTITIONS.items():
        for partition in range(partitions):
            place = kafka.place_of(topic, partition)
            records = kafka.read_partition(broker, topic, partition, DRAIN_S)
            # Offsets of markers and aborted records are not shown.
            missing[place] = check_stream(ledger, place, records, is_dense=topic == kafka.PLAIN)
    return missing


def check_stream(
    ledger: Ledger, place: Place, records: list[tuple[int, Label]], *, is_dense: bool = True
) -> list[Label]:
    """Return missing confirmed records."""
    offsets = [offset for offset, _ in records]
    if is_dense and offsets != list(range(len(offsets))):
        gap = next(at for at, offset in enumerate(offsets) if at != offset)
        ledger.problem(f"{place}: offset {gap} is missing; {offsets[gap]} follows {gap - 1}")
    labels = [label for _, label in records]
    check_order(ledger, place, labels)
    return ledger.compare(place, labels, destructive=False)


def check_embedded(path: Path, ledger: Ledger) -> Missing:
    messages, records = embedded.drain(path, DRAIN_S)
    found = {
        embedded.QUEUE_PLACE: ledger.compare(embedded.QUEUE_PLACE, messages),
        embedded.TOPIC_PLACE: check_stream(ledger, embedded.TOPIC_PLACE, records),
    }
    return {place: labels for place, labels in found.items() if labels}
