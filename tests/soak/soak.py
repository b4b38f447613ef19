"""The soak: a real broker with clients of every protocol is killed and restarted for a given time.

    round:  clients work for some seconds ─> the broker is killed or stopped under them ─> it starts ─> clients end
            ─> sometimes a damaged copy of the stopped broker's data is repaired and served
    end:    the checker drains everything

Clients, waits, the backlog (consumers are faster than producers on average) and disk space are bounded. All choices
derive from one seed, but thread scheduling does not, so a seed repeats a run only approximately.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from tests.interop.server import Broker
from tests.soak import amqp, amqp10, checker, grpc_queues, kafka, mqtt, rocketmq
from tests.soak.admin import AdminClient
from tests.soak.clients import Client, Round
from tests.soak.corruption import ACTIONS, CorruptionRound
from tests.soak.embedded import EmbeddedChild
from tests.soak.ledger import Ledger

from basaltmq.http_client import path

VHOSTS = ("/", "shop", "über")
FLAGS = ("--kafka-enabled=true", *rocketmq.FLAGS)

ROUND_S = (3.0, 8.0)
"""How long clients work in a round."""

JOIN_S = 90.0
"""Timeout of a client after its round: longer than any wait of a client library."""

RESERVE_SHARE = 0.25
RESERVE_MAX_S = 180.0
"""Share of the time for the final drain."""

CORRUPTION_S = 30.0
"""Estimated duration of the first damaged copy."""

CORRUPTION_EVERY = 3
"""Rounds between two damaged copies."""

STORES_MAX = len(VHOSTS) + 1
SHORT_STORES_MAX = 2
"""Stores damaged per copy, in a run of usual length and in a short one. Each takes some seconds."""

DISK_BYTES_MAX = 4 << 30
"""No copy is made of a larger data directory."""

AUDIT_SECONDS_MIN = 600
"""Shorter runs skip the audit with Spark, because starting a JVM per virtual host takes too long."""


class Soak:
    """One run."""

    def __init__(
        self,
        folder: Path,
        seconds: float,
        seed: int,
        kinds: tuple[str, ...],
        *,
        every: bool = False,
        say: Callable[[str], None] = print,
    ) -> None:
        """`every`: each round damages a copy, with kinds and actions in turn."""
        self._folder = folder
        self._seconds = seconds
        self._seed = seed
        self._kinds = kinds
        self._every = every
        self._say = say
        self._random = random.Random(seed)
        self._began_s = time.monotonic()
        self.ledger = Ledger(lambda text: say(f"PROBLEM at {self._elapsed_s():.0f} s: {text}"))
        self.broker = Broker(folder / "data", flags=FLAGS)
        self.rounds = self.kills = self.damaged = 0
        self._reserve_s = min(RESERVE_MAX_S, RESERVE_SHARE * seconds)
        self._corruption_s = CORRUPTION_S

    def run(self) -> list[str]:
        """Run. Return the problems."""
        try:
            self._prepare()
            while not self.ledger.problems and self._has_time(ROUND_S[1]):
                self._round()
            self._finish()
        except Exception as error:
            self.ledger.problem(f"round {self.rounds}: {type(error).__name__}: {str(error)[-1500:]}")
        finally:
            self.broker.end()
        return self.ledger.problems

    def _has_time(self, seconds: float) -> bool:
        return self._elapsed_s() + seconds < self._seconds - self._reserve_s

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def _prepare(self) -> None:
        self.broker.start()
        for vhost in VHOSTS[1:]:
            self.broker.call("PUT", path("vhosts", vhost), {})
            amqp.permit(self.broker, vhost)
        for vhost in VHOSTS:
            with amqp.connected(self.broker, vhost) as connection:
                amqp.declare_all(connection.channel())
        kafka.create_topics(self.broker)
        grpc_queues.create_queue(self.broker)
        mqtt.create_session(self.broker)
        mqtt.create_rule(self.broker)
        rocketmq.create_topic(self.broker)

    def _round(self) -> None:
        self.rounds += 1
        turn = Round(self.broker, self.ledger, self.rounds, self._seed)
        clients = self._clients(turn)
        child = EmbeddedChild(self._folder / "embedded", self.ledger, self.rounds, self._seed + self.rounds)
        for client in clients:
            client.thread.start()
        time.sleep(self._random.uniform(*ROUND_S))
        how = self._end_broker(turn)
        child.kill()
        damaged = self._copy()
        # Restart before clients end, because some libraries wait for the broker on close.
        self.broker.start()
        for client in clients:
            client.thread.join(JOIN_S)
            if client.thread.is_alive():
                self.ledger.problem(f"{client.name} did not end {JOIN_S:.0f} s after its round")
        lines = [f"{how}; {self._counts()}"]
        if damaged is not None and not self.ledger.problems:
            lines.append(self._corrupt(damaged))
        self._say(f"round {self.rounds} at {self._elapsed_s():.0f} s: {'; '.join(lines)}")

    def _clients(self, turn: Round) -> list[Client]:
        clients: list[Client] = [AdminClient(turn, VHOSTS)]
        for vhost in VHOSTS:
            clients += [amqp.Publisher(turn, "publisher", vhost), amqp.Consumer(turn, "consumer", vhost)]
        clients += [
            kafka.IdempotentProducer(turn, "producer"),
            kafka.TransactionalProducer(turn, "transactions"),
            kafka.GroupConsumer(turn, "group"),
            amqp10.Publisher(turn, "publisher"),
            amqp10.Consumer(turn, "consumer"),
            amqp10.Transactor(turn, "transactions"),
            mqtt.Publisher(turn, "mqtt-publisher"),
            mqtt.Subscriber(turn, "mqtt-subscriber"),
            grpc_queues.GrpcProducer(turn, "producer"),
            grpc_queues.GrpcWorker(turn, "worker-1"),
            grpc_queues.GrpcWorker(turn, "worker-2"),
            rocketmq.Producer(turn, "producer"),
            rocketmq.Consumer(turn, "consumer-1"),
            rocketmq.Consumer(turn, "consumer-2"),
        ]
        return clients

    def _end_broker(self, turn: Round) -> str:
        if self._random.random() < 0.6:
            turn.stopping.set()
            self.broker.kill()
            self.kills += 1
            return "killed"
        turn.stopping.set()
        code = self.broker.stop()
        if code:
            self.ledger.problem(f"the broker ended with {code} when it was stopped: {self.broker.log()[-1500:]}")
        return "stopped"

    def _counts(self) -> str:
        counts = self.ledger.counts()
        return f"{counts['confirmed']} confirmed, {counts['settled']} settled"

    def _copy(self) -> CorruptionRound | None:
        """Return a copy to damage, if it is due and there is time and space."""
        is_turn = (self._every or self.rounds % CORRUPTION_EVERY == 1) and bool(self._kinds)
        if not is_turn or not self._has_time(self._corruption_s):
            return None
        size = sum(each.stat().st_size for each in self.broker.data_dir.rglob("*") if each.is_file())
        if size > DISK_BYTES_MAX or shutil.disk_usage(self._folder).free < 3 * size:
            self._say(f"no damaged copy: the data has {size >> 20} MiB")
            return None
        return CorruptionRound(self.broker, self.ledger, self._folder, VHOSTS)

    def _corrupt(self, damaged: CorruptionRound) -> str:
        self.damaged += 1
        chance = random.Random(f"{self._seed}.damage.{self.damaged}")
        began_s = time.monotonic()
        kinds, actions = self._kinds, ACTIONS
        if self._every:
            number, turn = divmod(self.damaged - 1, len(ACTIONS))
            kinds, actions = (kinds[number % len(kinds)],), (ACTIONS[turn],)
        stores_max = STORES_MAX if self._seconds >= AUDIT_SECONDS_MIN else SHORT_STORES_MAX
        said = damaged.run(kinds, actions, chance, stores_max)
        self._corruption_s = time.monotonic() - began_s
        return said

    def _finish(self) -> None:
        """Drain and check, also after a problem, for more information."""
        try:
            missing = checker.check_broker(self.broker, self.ledger, VHOSTS)
            missing |= checker.check_rule(self.broker, self.ledger)
            code = self.broker.stop()
            if code:
                self.ledger.problem(f"the broker ended with {code} after the final drain")
            embedded = self._folder / "embedded"
            missing |= checker.check_embedded(embedded, self.ledger)
            for place, labels in missing.items():
                self.ledger.problem(
                    f"{place}: {len(labels)} confirmed messages are lost, such as {', '.join(map(str, labels[:3]))}"
                )
            checker.check_stores([*checker.stores_of(self.broker.data_dir), embedded], self.ledger)
            if self._seconds >= AUDIT_SECONDS_MIN:
                checker.check_audit(self.broker.data_dir, VHOSTS, self.ledger)
        except Exception as error:
            self.ledger.problem(f"the final drain failed: {type(error).__name__}: {str(error)[-1500:]}")
        self._say(
            f"final drain at {self._elapsed_s():.0f} s: {self.rounds} rounds, {self.kills} kills, {self.damaged} "
            f"damaged copies, {self._counts()}, {len(self.ledger.problems)} problems"
        )
