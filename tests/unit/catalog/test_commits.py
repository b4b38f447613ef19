"""Changes that are built, written and awaited separately, from threads and from asyncio."""

from __future__ import annotations

from uuid import uuid4

import pytest
from tests.unit.catalog.stores import CountingStore

from basaltmq.catalog.commits import Commits
from basaltmq.catalog.preferences import Preference, PreferenceStore
from basaltmq.errors import StorageError
from basaltmq.store.families import Family
from basaltmq.store.sync.group_commit import GroupCommit


@pytest.mark.spec("A2")
@pytest.mark.promise("P2")
def test_a_change_that_raises_writes_and_syncs_nothing(counting: CountingStore) -> None:
    commits = Commits(counting)
    ran: list[str] = []

    def fail() -> None:
        with commits.change() as change:
            change.put(Family.STATE, b"k", b"v")
            change.after.append(lambda: ran.append("after"))
            raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        fail()
    assert (counting.batches, counting.syncs, ran) == ([], 0, [])
    with commits.change():
        pass
    assert (counting.batches, counting.syncs) == ([], 0)


@pytest.mark.promise("P1")
def test_callbacks_run_between_the_write_and_the_sync_of_a_change(counting: CountingStore) -> None:
    seen: list[tuple[int, int]] = []
    commits = Commits(counting)
    with commits.change() as change:
        change.put(Family.STATE, b"k", b"v")
        change.after.append(lambda: seen.append((len(counting.batches), counting.syncs)))
    assert seen == [(1, 0)]
    assert counting.syncs == 1
    with commits.change(durable=False) as change:
        change.put(Family.STATE, b"k", b"w")
    assert counting.syncs == 1


@pytest.mark.promise("P1")
def test_a_failed_sync_fails_the_change_that_waited(counting: CountingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    group = GroupCommit(counting)
    preferences = PreferenceStore(counting, Commits(counting, group))
    preferences.open_and_load(lambda each: None)

    def fail() -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(counting, "sync", fail)
    with pytest.raises(StorageError, match="disk is gone"):
        preferences.update_or_create([Preference(uuid4(), "o", "t", "n", 0, 0, {})])
    group.close()
