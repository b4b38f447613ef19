"""Rounds of corruption: one file of a copy of the data directory is damaged, and the copy repaired and served.

    copy  ─> damage one file  ─> store verify  ─> store repair --accept-loss  ─> store verify: clean
          ─> start a broker on it  ─> undamaged virtual hosts lost nothing; the damaged one serves
          ─> what is missing there was named by verify, repair or the broker

`ENABLED` names the kinds of files that a run damages. A kind that is not enabled is implemented; `--kinds` (or
BASALT_SOAK_KINDS) chooses others: names with commas between them, or `all`.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pika
from tests.interop.server import Broker, running
from tests.soak import amqp, checker
from tests.soak.ledger import Ledger

FLIP = "flip"
TRUNCATE = "truncate"
REMOVE = "remove"
ACTIONS: tuple[str, ...] = (FLIP, TRUNCATE, REMOVE)


class Kind(NamedTuple):
    """A kind of file."""

    name: str
    pattern: str
    """Below a virtual host's directory."""
    is_log: bool = False
    """A damaged frame stays in the log and every verify names it; queues are not touched by it."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("segment", "store/log/*/*.log", is_log=True),
        Kind("ring", "store/log/*/RING", is_log=True),
        Kind("committed", "store/log/*/COMMITTED", is_log=True),
        Kind("lane", "store/log/*/LANE", is_log=True),
        Kind("lane-copy", "store/log/*/LANE.copy", is_log=True),
        Kind("vhost", ".vhost"),
        Kind("sst", "store/kv/*.sst"),
        Kind("blob", "store/kv/*.blob"),
        Kind("manifest", "store/kv/MANIFEST-*"),
        Kind("current", "store/kv/CURRENT"),
        Kind("wal", "store/kv/*.log"),
        Kind("store", "store/STORE"),
        Kind("seals", "store/SEALS"),
        Kind("options", "store/kv/OPTIONS-*"),
        Kind("identity", "store/kv/IDENTITY"),
        Kind("binding", "store/kv/rocksdict-config.json"),
    )
}

ENABLED: tuple[str, ...] = ("segment", "ring", "committed", "lane", "lane-copy")
"""Kinds that a run damages unless told."""


class Damage(NamedTuple):
    """What was done to which file."""

    kind: Kind
    action: str
    path: Path
    vhost: str

    def __str__(self) -> str:
        return f"{self.action} {self.kind.name} {self.path.name} of {self.vhost}"


def chosen_kinds(text: str) -> tuple[str, ...]:
    """Kinds by name; `all` for every one."""
    if not text:
        return ENABLED
    names = tuple(KINDS) if text == "all" else tuple(text.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise SystemExit(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return names


def damage(
    data: Path, folders: dict[str, str], kinds: tuple[str, ...], actions: tuple[str, ...], chance: random.Random
) -> Damage | None:
    """Damage one file; None if there is none of these kinds. `folders`: names of virtual hosts by directory."""
    candidates = [
        (KINDS[name], path, vhost)
        for name in kinds
        for folder, vhost in sorted(folders.items())
        for path in sorted((data / "vhosts" / folder).glob(KINDS[name].pattern))
        if path.stat().st_size
    ]
    if not candidates:
        return None
    # A kind first: there are many files of some.
    name = chance.choice(sorted({kind.name for kind, _, _ in candidates}))
    kind, path, vhost = chance.choice([each for each in candidates if each[0].name == name])
    action = chance.choice(actions)
    harm(path, action, chance)
    return Damage(kind, action, path, vhost)


def harm(path: Path, action: str, chance: random.Random) -> None:
    size = path.stat().st_size
    if action == REMOVE:
        path.unlink()
    elif action == TRUNCATE:
        with open(path, "r+b") as file:
            file.truncate(chance.randrange(size))
    else:
        with open(path, "r+b") as file:
            # Files are written in advance: zeros at their end are no content.
            used = len(file.read().rstrip(b"\0")) or size
            at = chance.randrange(used)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes((byte ^ 1 << chance.randrange(8),)))


class CorruptionRound:
    """One damaged copy. Made while no broker runs: it copies the data directory and the ledger."""

    def __init__(self, broker: Broker, ledger: Ledger, folder: Path, vhosts: tuple[str, ...]) -> None:
        self._flags = broker.flags
        self._ledger = ledger
        self._known = ledger.snapshot()
        self._folder = folder
        self._vhosts = vhosts
        shutil.rmtree(folder / "copy", ignore_errors=True)
        shutil.copytree(broker.data_dir, folder / "copy")

    def run(self, kinds: tuple[str, ...], actions: tuple[str, ...], chance: random.Random) -> str:
        """Do it; a line about it. Problems go to the ledger."""
        copy = self._folder / "copy"
        done = damage(copy, directories(copy, self._vhosts), kinds, actions, chance)
        if done is None:
            return f"corruption: there is no file of the kinds {', '.join(kinds)} yet"
        before = len(self._ledger.problems)
        lost = self._repair(copy, done)
        if len(self._ledger.problems) == before:
            shutil.rmtree(copy, ignore_errors=True)
        else:
            kept = self._folder / f"damaged-{done.kind.name}-{done.action}"
            shutil.rmtree(kept, ignore_errors=True)
            copy.rename(kept)
        return f"corruption: {done}: {lost} confirmed messages lost"

    def _repair(self, copy: Path, done: Damage) -> int:
        store = next(path for path in checker.stores_of(copy) if directory_of(copy, done.path) in path.parents)
        _, named = checker.basalt("--data-dir", str(store), "store", "verify")
        code, repaired = checker.basalt("--data-dir", str(store), "store", "repair", "--accept-loss")
        if code:
            self._ledger.problem(f"{done}: repair ends with {code}: {repaired[-500:]}")
        code, again = checker.basalt("--data-dir", str(store), "store", "verify")
        if code and not (done.kind.is_log and again.strip() == named.strip()):
            self._ledger.problem(f"{done}: verify after the repair ends with {code}: {again[-500:]}")
        report = "" if "is sound" in named and "nothing to repair" in repaired else named + repaired
        return self._serve(copy, done, report)

    def _serve(self, copy: Path, done: Damage, report: str) -> int:
        """How many confirmed messages the damaged virtual host lost."""
        snapshot = self._known.snapshot()
        try:
            with running(copy, *self._flags) as broker:
                told = report + broker.log()
                others = tuple(vhost for vhost in self._vhosts if vhost != done.vhost)
                missing = checker.check_broker(broker, snapshot, others)
                for place, labels in missing.items():
                    self._ledger.problem(
                        f"{done}: {place} lost {len(labels)} confirmed messages, such as {labels[0]}, in an undamaged "
                        "virtual host"
                    )
                for text in snapshot.problems:
                    self._ledger.problem(f"{done}: {text}")
                return self._damaged(broker, done, told)
        except Exception as error:
            self._ledger.problem(f"{done}: {type(error).__name__}: {str(error)[-1500:]}")
            return 0

    def _damaged(self, broker: Broker, done: Damage, told: str) -> int:
        probe(broker, done.vhost)
        snapshot = self._known.snapshot()
        missing = checker.check_broker(broker, snapshot, (done.vhost,))
        lost = sum(len(labels) for labels in missing.values())
        told += broker.log()
        is_named = done.path.name in told or "damaged" in told or "lost" in told or "quarantine" in told
        if lost and not is_named:
            self._ledger.problem(f"{done}: {lost} confirmed messages are missing and no report names a loss")
        if done.kind.is_log:
            for place in missing:
                if not is_stream(place):
                    self._ledger.problem(f"{done}: {place} lost messages, and a queue has none in the log")
        return lost


def is_stream(place: str) -> bool:
    return place.startswith("kafka|") or place.endswith(f"|{amqp.STREAM}")


def probe(broker: Broker, vhost: str) -> None:
    """The virtual host serves: a queue is declared, a message published, confirmed and got back."""
    with amqp.connected(broker, vhost) as connection:
        channel: Any = connection.channel()
        # What the damage took of the topology is made again, so that the drain finds its queues.
        amqp.declare_all(channel)
        channel.queue_declare("probe", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "probe", b"probe", pika.BasicProperties(delivery_mode=2))
        _, _, body = channel.basic_get("probe", auto_ack=True)
        assert body == b"probe", f"the virtual host {vhost} does not serve: {body!r}"


def directories(data: Path, vhosts: tuple[str, ...]) -> dict[str, str]:
    """Names of virtual hosts by the name of their directory."""
    from basaltmq.broker.vhost_directory import directory_name

    return {directory_name(vhost): vhost for vhost in vhosts if (data / "vhosts" / directory_name(vhost)).is_dir()}


def directory_of(data: Path, path: Path) -> Path:
    """The directory of the virtual host a file belongs to."""
    return data / "vhosts" / path.relative_to(data / "vhosts").parts[0]
