"""Comparison of brokers: the same jobs on Basalt and every installed peer, in turns.

A peer is skipped if it or its load is missing. The output says what to install or set:

- RabbitMQ: Debian's `rabbitmq-server`. Basalt's queues and RabbitMQ's need BASALT_AMQP_LOAD as well.
- NATS JetStream with its file store, with and without `sync_interval: always`: `nats-server` on the path or in
  BASALT_NATS_SERVER, and Go for the load.
- Redis Streams with `appendfsync always`: `redis-server`, and Go for the load.
- Kafka, streams only: BASALT_KAFKA_JARS, as in the bench kafka_peer.

BASALT_PERF_TEST_JARS adds the flood of RabbitMQ's perf-test. BASALT_BENCH_MESSAGES sets the messages of a turn. A run
at the usual size draws docs/img/peers.svg.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from bench.kafka_peer import create_topics
from bench.log_rig import bench_path
from bench.row import Row
from bench.side_by_side import brokers, loads
from bench.side_by_side.chart import draw
from bench.side_by_side.comparison import Contender, rows, run_floods, run_turns
from bench.side_by_side.flood import flood, perf_test_jars
from bench.side_by_side.process import Side
from bench.size import is_quick

QUEUES: Final = frozenset({loads.QUEUE, loads.FAN_OUT})
STREAMS: Final = frozenset({loads.STREAM})
NATS_SYNCED_PART: Final = 10
"""NATS syncs every message by itself: about 2,400 msg/s on the disk on which others reach 70,000."""


def run() -> list[Row]:
    with bench_path() as folder, ExitStack() as stack:
        contenders = list(_contenders(folder, stack))
        figures = run_turns(contenders)
        made = rows(figures)
        jars = perf_test_jars()
        if jars is None:
            _skip("perf-test flood", "set BASALT_PERF_TEST_JARS to the folder with its jars, and install Java")
        else:
            made += run_floods(partial(flood, jars), [each.side for each in contenders if _speaks_amqp(each)])
    if not is_quick():
        draw(figures)
    return made


def _speaks_amqp(contender: Contender) -> bool:
    return contender.side.name in ("Basalt", "RabbitMQ") and loads.QUEUE in contender.kinds


def _contenders(folder: Path, stack: ExitStack) -> Iterator[Contender]:
    """Start every broker that can be measured. All of them run until the end and are idle while another one has its
    turn."""
    start = stack.enter_context
    amqp = loads.amqp_program()
    if amqp is None:
        _skip("Basalt's queues, RabbitMQ", "set BASALT_AMQP_LOAD to the load program")
    else:
        command = loads.amqp_command(amqp)
        yield Contender(start(brokers.basalt_amqp(folder / "basalt-amqp")), command, QUEUES)
        program = brokers.rabbitmq_program()
        if program is None:
            _skip("RabbitMQ", "install Debian's rabbitmq-server")
        else:
            yield Contender(start(brokers.rabbitmq(program, folder)), command, QUEUES)
    yield Contender(start(brokers.basalt_kafka(folder / "basalt-kafka")), loads.kafka_command, STREAMS, 1, _topic)
    jars = brokers.kafka_jars()
    if jars is None:
        _skip("Kafka", "set BASALT_KAFKA_JARS to the folder with its jars, and install Java")
    else:
        yield Contender(start(brokers.kafka(jars, folder / "kafka")), loads.kafka_command, STREAMS, 1, _topic)
    yield from _with_go_load(folder, stack)


def _with_go_load(folder: Path, stack: ExitStack) -> Iterator[Contender]:
    start = stack.enter_context
    nats, redis = brokers.nats_program(), shutil.which("redis-server")
    if nats is None:
        _skip("NATS", "go install github.com/nats-io/nats-server/v2@v2.10.22, or set BASALT_NATS_SERVER")
    if redis is None:
        _skip("Redis", "install Debian's redis-server")
    if nats is None and redis is None:
        return
    load = loads.build_go_load(folder)
    if load is None:
        _skip("NATS, Redis", f"their load {loads.SOURCE} was not built; install Go and have its modules at hand")
        return
    if nats is not None:
        command = loads.go_command(load, "nats")
        yield Contender(start(brokers.nats(nats, folder, synced=False)), command, QUEUES | STREAMS)
        synced = start(brokers.nats(nats, folder, synced=True))
        yield Contender(synced, command, QUEUES | STREAMS, NATS_SYNCED_PART)
    if redis is not None:
        yield Contender(start(brokers.redis(redis, folder)), loads.go_command(load, "redis"), QUEUES | STREAMS)


def _topic(side: Side, name: str) -> None:
    create_topics(side, [name], 1, {"basalt.durability": "synced"} if side.name == "Basalt" else {})


def _skip(what: str, remedy: str) -> None:
    print(f"peers: {what} skipped: {remedy}", file=sys.stderr, flush=True)
