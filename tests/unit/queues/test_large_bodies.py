"""Large bodies in queues on disk: written once, moved by reference, deleted with the last message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from basaltmq.queues.config import QueueConfig
from basaltmq.queues.draft import Draft
from basaltmq.queues.plane import QueuePlane
from basaltmq.queues.transactions.xid import Xid
from basaltmq.store.bodies.store import BodyStore
from basaltmq.store.families import Family
from basaltmq.store.integrity.body_frames import decode_files
from basaltmq.store.open import open_store
from basaltmq.store.sync.group_commit import GroupCommit

BODY = bytes(range(256)) * 400
X = Xid(1, b"g", b"b")


class Home:
    """A plane on a store on disk, which can be opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.store: BodyStore = open_store(self.path)
        self.commit = GroupCommit(self.store)
        self.plane = QueuePlane(self.store, self.commit)

    def close(self) -> None:
        self.plane.close()
        self.commit.close()
        self.store.close()

    def reopen(self) -> None:
        self.close()
        self.open()

    def written(self) -> int:
        """Bytes in all body files."""
        return sum(each.stat().st_size for each in (self.path / "bodies").glob("*.body"))

    def live(self) -> int:
        return sum(decode_files(self.store.scan(Family.BODY_FILES)).values())


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    opened = Home(tmp_path / "store")
    for name in ("a", "b", "c"):
        opened.plane.create(QueueConfig(name=name, attempts_max=1, dead_letter_queue="dead"))
    yield opened
    opened.close()


def take(home: Home, queue: str) -> list[bytes]:
    taken: list[bytes] = []
    while held := home.plane.lease(queue, 10):
        taken += [each.payload for each in held]
        home.plane.ack(queue, held[0].token)
    return taken


@pytest.mark.spec("E3", "E4", "E5")
def test_a_large_body_is_written_once_for_all_its_queues_and_goes_with_the_last(home: Home) -> None:
    home.plane.publish(["a", "b", "c"], BODY)
    assert len(BODY) < home.written() < len(BODY) + 100
    for queue in ("a", "b"):
        assert take(home, queue) == [BODY]
        assert home.live() > len(BODY)
    home.reopen()
    assert take(home, "c") == [BODY]
    assert home.live() == 0


@pytest.mark.spec("C8", "C9", "E3")
def test_requeue_dead_letter_delay_and_redrive_write_no_body_again(home: Home) -> None:
    home.plane.enqueue("a", [Draft(payload=BODY, delay_ms=1)])
    written = home.written()
    home.plane.run_due(2**62)
    held = home.plane.lease("a")
    home.plane.release("a", held[0].token)
    held = home.plane.lease("a")
    home.plane.nack("a", held[0].token)
    assert home.plane.stats("dead")["messages"] == 1
    home.plane.redrive("dead", count=1)
    home.reopen()
    assert home.written() == written
    assert take(home, "a") == [BODY]
    assert home.live() == 0


@pytest.mark.spec("A6", "E4")
@pytest.mark.parametrize("commit", [True, False])
def test_a_prepared_branch_keeps_its_large_body_over_a_restart(home: Home, commit: bool) -> None:
    session = home.plane.xa.begin(X)
    session.enqueue("a", [BODY])
    session.enqueue("b", [BODY])
    session.end()
    home.plane.xa.prepare(X)
    written = home.written()
    home.reopen()
    assert home.live() > len(BODY)
    if commit:
        home.plane.xa.commit(X)
        assert home.written() == written
    else:
        home.plane.xa.rollback(X)
    assert [take(home, queue) for queue in ("a", "b")] == ([[BODY], [BODY]] if commit else [[], []])
    assert home.live() == 0


@pytest.mark.spec("E4")
def test_a_large_body_that_is_acknowledged_in_its_own_change_is_not_written(home: Home) -> None:
    with home.plane.change():
        held = home.plane.deliver("a", [BODY], consumer="c")
        home.plane.ack("a", held[0].token)
    assert [each.payload for each in held] == [BODY]
    assert home.written() == 0


@pytest.mark.spec("C13")
@pytest.mark.promise("P10")
def test_deleting_a_queue_frees_its_large_bodies(home: Home) -> None:
    home.plane.enqueue("a", [BODY] * 50)
    home.plane.publish(["a", "b"], BODY)
    home.plane.delete("a")
    home.plane.run_due(2**62)
    while home.plane._shared.reclaim.is_pending:
        home.plane._changes.do(home.plane._shared.reclaim.step)
    assert len(BODY) < home.live() < len(BODY) + 100
    assert take(home, "b") == [BODY]
    assert home.live() == 0


@pytest.mark.promise("P7")
def test_a_damaged_large_body_is_quarantined_alone(home: Home) -> None:
    home.plane.enqueue("a", [b"1" + BODY, b"2" + BODY, b"3" + BODY])
    (path,) = (home.path / "bodies").glob("*.body")
    home.close()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    home.open()
    assert take(home, "a") == [b"1" + BODY, b"3" + BODY]
    assert home.plane.stats("a")["messages"] == 0
    assert len(list(home.store.scan(Family.QUARANTINE))) == 1
