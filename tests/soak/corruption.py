"""Rounds of corruption: a copy of all data is damaged, one file in some of its stores, then repaired and served.

    copy  ─> census  ─> damage a file  ─> store verify  ─> store repair --accept-loss  ─> store verify: clean
          ─> start a broker on it  ─> undamaged virtual hosts lost nothing; the damaged ones serve
          ─> verify, repair or the broker reported each missing message (see `report`)

A store is that of a virtual host, of the node, or the embedded one. `--kinds` (or BASALT_SOAK_KINDS)
chooses kinds of files: names with commas between them, or `all`.
"""

from __future__ import annotations

import logging
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pika
import pika.exceptions
from tests.interop.server import Broker, running
from tests.soak import amqp, checker, embedded, rocketmq
from tests.soak.census import Census
from tests.soak.ledger import Label, Ledger, Place
from tests.soak.report import Report

from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.http_client import path

FLIP = "flip"
TRUNCATE = "truncate"
REMOVE = "remove"
ZERO = "zero"
ACTIONS: tuple[str, ...] = (FLIP, TRUNCATE, REMOVE, ZERO)

ZERO_BYTES_MAX = 4096
"""Size of a zeroed page, which a power loss may leave."""

COMMANDS_AT_ONCE = 2
"""Maximum parallel commands on damaged stores."""

NODE = "the node"
EMBEDDED = "the embedded store"


class Kind(NamedTuple):
    """A kind of file."""

    name: str
    pattern: str
    """Below the directory of a store."""
    is_log: bool = False
    """Kinds whose damage stays after a repair: verify reports a damaged frame always, and ENDS until the next open."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("segment", "log/*/*.log", is_log=True),
        Kind("ring", "log/*/RING", is_log=True),
        Kind("committed", "log/*/COMMITTED", is_log=True),
        Kind("lane", "log/*/LANE", is_log=True),
        Kind("lane-copy", "log/*/LANE.copy", is_log=True),
        Kind("ends", "ENDS", is_log=True),
        Kind("vhost", "../.vhost"),
        Kind("secret", "../secret"),
        Kind("sst", "kv/*.sst"),
        Kind("blob", "kv/*.blob"),
        Kind("body", "bodies/*.body"),
        Kind("manifest", "kv/MANIFEST-*"),
        Kind("current", "kv/CURRENT"),
        Kind("wal", "kv/*.log"),
        Kind("store", "STORE"),
        Kind("seals", "SEALS"),
        Kind("synced", "SYNCED"),
        Kind("options", "kv/OPTIONS-*"),
        Kind("identity", "kv/IDENTITY"),
        Kind("binding", "kv/rocksdict-config.json"),
    )
}

ENABLED: tuple[str, ...] = tuple(KINDS)
"""Kinds that a run damages by default."""


class Damage(NamedTuple):
    """One damage of a file."""

    kind: Kind
    action: str
    path: Path
    owner: str
    """A virtual host, NODE or EMBEDDED."""
    store: Path
    census: Census
    report: Report

    def __str__(self) -> str:
        return f"{self.action} {self.kind.name} {self.path.name} of {self.owner}"


def chosen_kinds(text: str) -> tuple[str, ...]:
    """Return kinds by name; `all` returns every kind."""
    if not text:
        return ENABLED
    names = tuple(KINDS) if text == "all" else tuple(text.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise SystemExit(f"there is no kind {unknown[0]!r}; there are {', '.join(KINDS)}")
    return names


def damage(
    owner: str, store: Path, kinds: tuple[str, ...], actions: tuple[str, ...], chance: random.Random
) -> Damage | None:
    """Damage one file of a store. Return None if it has no file of these kinds."""
    candidates = [
        (KINDS[name], path)
        for name in kinds
        for path in sorted(store.glob(KINDS[name].pattern))
        if path.is_file() and path.stat().st_size
    ]
    if not candidates:
        return None
    # Choose a kind first, because some have many files.
    name = chance.choice(sorted({kind.name for kind, _ in candidates}))
    kind, path = chance.choice([each for each in candidates if each[0].name == name])
    action = chance.choice(actions)
    census = Census.take(store)
    harm(path, action, chance)
    return Damage(kind, action, path, owner, store, census, Report(path.name))


def harm(path: Path, action: str, chance: random.Random) -> None:
    size = path.stat().st_size
    if action == REMOVE:
        path.unlink()
    elif action == TRUNCATE:
        with open(path, "r+b") as file:
            file.truncate(chance.randrange(size))
    elif action == ZERO:
        with open(path, "r+b") as file:
            used = len(file.read().rstrip(b"\0")) or size
            at = chance.randrange(used)
            file.seek(at)
            file.write(bytes(min(size - at, ZERO_BYTES_MAX)))
    else:
        with open(path, "r+b") as file:
            # Files are preallocated: zeros at their end are no content.
            used = len(file.read().rstrip(b"\0")) or size
            at = chance.randrange(used)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes((byte ^ 1 << chance.randrange(8),)))


class CorruptionRound:
    """One damaged copy of all data and the ledger, made while no broker runs."""

    def __init__(self, broker: Broker, ledger: Ledger, folder: Path, vhosts: tuple[str, ...]) -> None:
        self._flags = broker.flags
        self._ledger = ledger
        self._known = ledger.snapshot()
        self._folder = folder
        self._vhosts = vhosts
        self._all = folder / "copy"
        self._data = self._all / "data"
        self._done: dict[str, Damage] = {}
        shutil.rmtree(self._all, ignore_errors=True)
        shutil.copytree(broker.data_dir, self._data)
        if (folder / "embedded").is_dir():
            shutil.copytree(folder / "embedded", self._all / "embedded")

    def run(self, kinds: tuple[str, ...], actions: tuple[str, ...], chance: random.Random, stores_max: int) -> str:
        """Damage at most this many stores, repair and check them. Return a summary; problems go to the ledger."""
        stores = self._stores()
        # One store stays undamaged, to check that damage of others does not affect it.
        owners = chance.sample(sorted(stores), min(stores_max, len(stores) - 1))
        damaged = [damage(owner, stores[owner], kinds, actions, chance) for owner in owners]
        self._done = {done.owner: done for done in damaged if done is not None}
        if not self._done:
            return f"corruption: there is no file of the kinds {', '.join(kinds)} yet"
        before = len(self._ledger.problems)
        with ThreadPoolExecutor(COMMANDS_AT_ONCE) as pool:
            list(pool.map(self._repair, self._done.values()))
        lost = self._guarded(self._serve)
        lost += self._guarded(self._embedded)
        if len(self._ledger.problems) == before:
            shutil.rmtree(self._all, ignore_errors=True)
        else:
            self._keep()
        return f"corruption: {'; '.join(map(str, self._done.values()))}: {lost} confirmed messages lost"

    def _guarded(self, check: Callable[[], int]) -> int:
        try:
            return check()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._ledger.problem(f"{'; '.join(map(str, self._done.values()))}: {trace[-2500:]}")
            return 0

    def _keep(self) -> None:
        """Keep the copy and its report."""
        number = 1
        while (kept := self._folder / f"damaged-{number}").exists():
            number += 1
        self._all.rename(kept)
        for number, done in enumerate(self._done.values(), 1):
            losses = "".join(f"{loss}\n" for loss in done.report.losses)
            (kept / f"report-{number}.txt").write_text(f"{done}\n{done.report.text}\n{losses}")

    def _problem(self, done: Damage, text: str) -> None:
        self._ledger.problem(f"{done}: {text}")

    def _stores(self) -> dict[str, Path]:
        """Return the directories of all stores by owner."""
        found = {vhost: VHostDirectories(self._data).store(vhost) for vhost in self._vhosts}
        found |= {NODE: self._data / "node" / "store", EMBEDDED: self._all / "embedded"}
        return {owner: store for owner, store in found.items() if store.is_dir()}

    def _repair(self, done: Damage) -> None:
        store = ("--data-dir", str(done.store), "store")
        code, faults = checker.basalt(*store, "verify")
        done.report.text += faults
        self._require_said(done, "verify", code, faults)
        code, repaired = checker.basalt(*store, "repair", "--accept-loss", "--json")
        self._require_said(done, "repair", code, repaired)
        if code:
            self._problem(done, f"repair ends with {code}: {repaired[-500:]}")
            return
        done.report.add_repair(repaired)
        code, again = checker.basalt(*store, "verify")
        if code and not (done.kind.is_log and _faults(again) <= _faults(faults)):
            self._problem(done, f"verify after the repair ends with {code}: {again[-500:]}")

    def _require_said(self, done: Damage, command: str, code: int, said: str) -> None:
        """Check that a command reports its findings without a traceback."""
        if "Traceback" in said or code not in (0, 1, 2):
            self._problem(done, f"{command} ends with {code}: {said[-1500:]}")

    def _embedded(self) -> int:
        done = self._done.get(EMBEDDED)
        if done is None:
            return 0
        snapshot = self._known.snapshot()
        with _logged() as lines:
            missing = checker.check_embedded(done.store, snapshot)
        done.report.text += "\n".join(lines)
        return self._compare(done, missing, snapshot)

    def _serve(self) -> int:
        """Return the number of confirmed messages that the damaged virtual hosts lost."""
        vhosts = [owner for owner in self._done if owner in self._vhosts]
        if self._done.keys() == {EMBEDDED}:
            return 0
        is_node_lost = NODE in self._done and bool(self._done[NODE].report.losses)
        # Like an operator after a repair of the node store that lost writes.
        recovering = ("--recover-vhosts",) if is_node_lost else ()
        with running(self._data, *self._flags, *recovering) as broker:
            if is_node_lost:
                self._create_nameless(broker)
                for vhost in self._vhosts:
                    amqp.permit(broker, vhost)
            for vhost in self._vhosts:
                probe(broker, vhost, self._done)
            others = tuple(vhost for vhost in self._vhosts if vhost not in vhosts)
            groups = [others, *((vhost,) for vhost in vhosts)]
            snapshots = [self._known.snapshot() for _ in groups]
            with ThreadPoolExecutor(len(groups)) as pool:
                checked = [
                    pool.submit(checker.check_broker, broker, snapshot, group)
                    for group, snapshot in zip(groups, snapshots, strict=True)
                ]
                missing = [each.result() for each in checked]
            for place, labels in missing[0].items():
                self._ledger.problem(f"{place} was not damaged and lost {len(labels)} messages, such as {labels[0]}")
            for text in snapshots[0].problems:
                self._ledger.problem(f"not damaged: {text}")
            log = broker.log()
        lost = 0
        for vhost, found, snapshot in zip(vhosts, missing[1:], snapshots[1:], strict=True):
            self._done[vhost].report.text += log
            lost += self._compare(self._done[vhost], found, snapshot)
        return lost

    def _create_nameless(self, broker: Broker) -> None:
        """Create the virtual hosts whose names are lost after both damages, as the log advises."""
        served = {each["name"] for each in broker.call("GET", path("vhosts"))}
        for vhost in self._vhosts:
            if vhost not in served:
                directory = VHostDirectories(self._data).store(vhost).parent
                (self._data / "quarantine" / f"{directory.name}.0").rename(directory)
                broker.call("PUT", path("vhosts", vhost), {})

    def _compare(self, done: Damage, missing: checker.Missing, snapshot: Ledger) -> int:
        """Check that the report names each loss. Without one, no other problem is allowed."""
        done.report.add_unreadable(done.store)
        for place, labels in missing.items():
            unnamed = [label for label in labels if not is_named(place, label, done.census, done.report)]
            if unnamed:
                self._problem(
                    done,
                    f"{place} lost {len(labels)} confirmed messages; no report names {len(unnamed)} of them, such as "
                    f"{', '.join(map(str, unnamed[:3]))}",
                )
            if done.kind.is_log and not is_stream(place):
                self._problem(done, f"{place} lost messages, and a queue has none in the log")
        if done.report.is_empty:
            for text in snapshot.problems:
                self._problem(done, text)
        return sum(len(labels) for labels in missing.values())


def is_named(place: Place, label: Label, census: Census, report: Report) -> bool:
    """Return whether the report names the loss of a message."""
    if is_stream(place):
        return report.names_record(census.record_of(*topic_of(place), label), census)
    queue = place.split("|", 1)[1]
    held = [each for each in census.messages.get(label, ()) if each.queue in (queue, amqp.DEAD, f"{queue}.dlq")]
    return any(report.names_message(each) for each in held)


def is_stream(place: Place) -> bool:
    return (
        place.startswith("kafka|")
        or place in (embedded.TOPIC_PLACE, rocketmq.PLACE)
        or place.endswith(f"|{amqp.STREAM}")
    )


def topic_of(place: Place) -> tuple[str, int | None]:
    """Return topic and partition of a stream. None: the broker chose the partition of each record."""
    name = place.split("|", 1)[1]
    if place == rocketmq.PLACE:
        return name, None
    if place.startswith("kafka|"):
        topic, _, partition = name.rpartition("-")
        return topic, int(partition)
    return name, 0


def probe(broker: Broker, vhost: str, damaged: dict[str, Damage]) -> None:
    """Check that the virtual host declares a queue, confirms a publish and delivers the message."""
    with amqp.connected(broker, vhost) as connection:
        # Recreate the lost topology, so that the drain finds its queues.
        for declare_one in amqp.DECLARATIONS:
            try:
                declare_one(connection.channel())
            except pika.exceptions.ChannelClosedByBroker as error:
                # A queue whose settings were lost has default settings now.
                if vhost not in damaged or "default settings" not in damaged[vhost].report.text:
                    raise AssertionError(f"{vhost}: {error}") from error
    with amqp.connected(broker, vhost) as connection:
        channel: Any = connection.channel()
        channel.queue_declare("probe", durable=True)
        channel.confirm_delivery()
        channel.basic_publish("", "probe", b"probe", pika.BasicProperties(delivery_mode=2))
        _, _, body = channel.basic_get("probe", auto_ack=True)
        assert body == b"probe", f"the virtual host {vhost} does not serve: {body!r}"


def _faults(table: str) -> set[str]:
    """Return damaged files and bytes of the table of `store verify`. Repair does not change damaged logs."""
    return {line.split("; lost:")[0].strip() for line in table.splitlines() if line.startswith("/")}


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect log lines of Basalt in this process, in the format of a broker's log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("basaltmq")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
