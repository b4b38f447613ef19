"""kill -9 while vhosts with topics are created, updated and deleted: each is complete or absent."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.crash.harness import END, ERROR, Child, Forge, pause

from basaltmq.catalog.catalog import Catalog
from basaltmq.catalog.record import ROOT
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

KILLS = 12


class Expected:
    """Confirmed vhosts -> (topics, value), and the one change whose result is unknown."""

    def __init__(self) -> None:
        self.vhosts: dict[str, tuple[int, int]] = {}
        self.doubtful: dict[str, tuple[int, int] | None] = {}
        self.confirmed = 0

    def receive_line(self, line: str) -> None:
        sign, change, name, figure = line.split()
        after = {
            "create": (int(figure), -1),
            "update": (self.vhosts.get(name, (0, 0))[0], int(figure)),
            "delete": None,
        }[change]
        if sign == "?":
            self.doubtful = {name: after}
            return
        self.confirmed += 1
        self.doubtful = {}
        self.settle(name, after)

    def settle(self, name: str, after: tuple[int, int] | None) -> None:
        if after is None:
            self.vhosts.pop(name, None)
        else:
            self.vhosts[name] = after


def _ride(child: Child, expected: Expected, rng: random.Random) -> None:
    """Read the child's lines for a while, kill it, and read the rest."""
    left = rng.randint(1, 80)
    lines = child.lines(timeout_s=30)
    heard = []
    for line in lines:
        heard.append(line)
        if len(heard) == left:
            break
    pause(rng.random() * 0.004)
    child.kill()
    heard += lines
    child.close()
    for line in heard:
        assert not line.startswith(ERROR), "\n".join(heard[-40:])
        if line != END:
            expected.receive_line(line)


def _check(path: Path, expected: Expected) -> None:
    store = open_store(path, create=False)
    catalog = Catalog(store)
    catalog.open()
    found: dict[str, tuple[int, int]] = {}
    objects = 0
    for vhost in catalog.children(ROOT):
        topics = list(catalog.children(vhost.id))
        assert len(topics) == vhost.attributes["topics"], f"vhost {vhost.name} is not complete"
        found[vhost.name] = (len(topics), vhost.attributes["value"])
        objects += 1 + len(topics)
    for name, after in expected.doubtful.items():
        if found.get(name) == after:
            expected.settle(name, after)
    expected.doubtful = {}
    assert found == expected.vhosts
    report = catalog.check()
    assert report.faults == []
    assert report.visited == objects
    assert not any(store.scan(Family.DELETED_OBJECTS))
    catalog.close()
    store.close()


@pytest.mark.spec("A2", "D1")
@pytest.mark.promise("P1", "P2", "P10")
def test_kill_9_leaves_vhosts_complete_or_absent(forge: Forge, tmp_path: Path) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "store"
    expected = Expected()
    for ride in range(4 * KILLS):
        if ride >= KILLS and expected.confirmed > KILLS:
            break
        _ride(forge.start("tests.crash.catalog_workload:run", str(path), rng.getrandbits(32)), expected, rng)
        _check(path, expected)
    assert expected.confirmed > KILLS, "too few changes were confirmed before the kills"
