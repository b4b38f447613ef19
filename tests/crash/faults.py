"""Workloads of children on a full or failing disk. They report what they observe; the tests check it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.crash.harness import Emit, Shim

from basaltmq.errors import BasaltError
from basaltmq.store.batch import Batch
from basaltmq.store.checkpoint import restore
from basaltmq.store.families import Family
from basaltmq.store.open import open_store
from basaltmq.store.rocks import RocksStore
from basaltmq.store.sync.group_commit import GroupCommit

CONFIRMED: Final = 30
FAMILIES: Final = (Family.MESSAGES, Family.LEASES, Family.STREAM_RECORDS)


def batch_of(number: int) -> Batch:
    batch = Batch()
    for family in FAMILIES:
        batch.put(family, b"%06d" % number, b"%06d" % number * 1000)
    return batch


def numbers(store: RocksStore) -> set[int]:
    """Return the tokens, which must be in all three families."""
    one, two, three = ({int(key): value for key, value in store.scan(family)} for family in FAMILIES)
    assert one == two == three, "partially applied"
    assert all(value == b"%06d" % number * 1000 for number, value in one.items())
    return set(one)


def commit(store: RocksStore, commits: GroupCommit, batch: Batch) -> None:
    """Write a batch and wait until it is durable."""
    store.write(batch)
    commits.wait_durable()


def attempt(emit: Emit, name: str, action: Callable[[], object]) -> None:
    """Run it. Return the error's class and text, or `fine`."""
    try:
        action()
    except BasaltError as error:
        emit(f"{name} {type(error).__name__} {error}")
    else:
        emit(f"{name} fine")


def fill(emit: Emit, path: str, control: str, what: str, ops: str, pattern: str, code: int, half: int) -> None:
    """Confirm some writes, make the disk fail, run `what`, heal the disk, and check the reopened store."""
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    store = open_store(base)
    commits = GroupCommit(store)
    for number in range(CONFIRMED):
        commit(store, commits, batch_of(number))
    unconfirmed = batch_of(CONFIRMED)
    if what in ("flush", "close"):
        store.write(batch_of(CONFIRMED))
    shim.fail(ops, pattern, code, half=bool(half))
    actions: dict[str, Callable[[], object]] = {
        "commit": lambda: commit(store, commits, unconfirmed),
        "flush": store.flush,
        "checkpoint": lambda: store.checkpoint(base.with_name("copy")),
        "close": lambda: None,
    }
    attempt(emit, what, actions[what])
    attempt(emit, "get", lambda: store.get(Family.MESSAGES, b"x"))
    attempt(emit, "write", lambda: commit(store, commits, batch_of(CONFIRMED + 1)))
    if what != "close":
        shim.heal()
    commits.close()
    attempt(emit, "closing", store.close)
    shim.heal()
    _look(emit, base)
    emit("beside " + " ".join(sorted(entry.name for entry in base.parent.iterdir())))


def fill_while_opening(emit: Emit, path: str, control: str, ops: str, pattern: str) -> None:
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    store = open_store(base)
    for number in range(CONFIRMED):
        store.write(batch_of(number))
    store.sync()
    store.poison(RuntimeError("closed without a flush, so that there is something to recover"))
    store.close()
    shim.fail(ops, pattern, errno.ENOSPC)
    attempt(emit, "open", lambda: open_store(base))
    shim.heal()
    _look(emit, base)


def fill_while_restoring(emit: Emit, path: str, control: str) -> None:
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    with_rows(base).close()
    store = open_store(base)
    store.checkpoint(base.with_name("copy"))
    store.close()
    shim.fail("write,pwrite", "*/back.partial*.sst", errno.ENOSPC)
    attempt(emit, "restore", lambda: restore(base.with_name("copy"), base.with_name("back")))
    emit("beside " + " ".join(sorted(entry.name for entry in base.parent.iterdir())))
    shim.heal()
    attempt(emit, "again", lambda: restore(base.with_name("copy"), base.with_name("back")))
    _look(emit, base.with_name("back"))


def with_rows(path: Path) -> RocksStore:
    store = open_store(path)
    for number in range(CONFIRMED):
        store.write(batch_of(number))
    store.sync()
    store.flush()
    return store


def fail_one_sync(emit: Emit, path: str, control: str) -> None:
    """Eight threads wait for a failing sync. Other writes were confirmed before; others follow."""
    base = Path(path)
    shim = Shim(base.parent, Path(control))
    store = open_store(base)
    commits = GroupCommit(store)
    for number in range(CONFIRMED):
        commit(store, commits, batch_of(number))
    shim.fail("fdatasync,fsync", "*/kv/*.log", errno.EIO)
    start = threading.Barrier(8)

    def waiter(number: int) -> None:
        start.wait(30)
        attempt(emit, "waiter", lambda: commit(store, commits, batch_of(number)))

    threads = [threading.Thread(target=waiter, args=(CONFIRMED + number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shim.heal()
    attempt(emit, "after", lambda: commit(store, commits, batch_of(CONFIRMED + 8)))
    commits.close()
    store.close()
    _look(emit, base)


def open_on(emit: Emit, path: str, control: str, code: int) -> None:
    """Open a store on a file system where no write succeeds."""
    shim = Shim(Path(path), Path(control))
    shim.rule(
        f"open,mkdir,link,rename * {code} 0 all",
        f"write,pwrite,writev,fsync,fdatasync * {code} 0 all",
    )
    attempt(emit, "open", lambda: open_store(Path(path)))
    attempt(emit, "create", lambda: open_store(Path(path) / "below"))
    shim.heal()


def hold(emit: Emit, path: str) -> None:
    """Keep a store open until killed."""
    store = open_store(Path(path))
    emit("open")
    threading.Event().wait(60)
    store.close()


def open_as_nobody(emit: Emit, path: str) -> None:
    """Open a store as a user without write permission."""
    import os

    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    attempt(emit, "open", lambda: open_store(Path(path)))


def _look(emit: Emit, base: Path) -> None:
    store = open_store(base)
    found = numbers(store)
    faults = store.verify()
    store.close()
    emit(f"lost {len(set(range(CONFIRMED)) - found)}")
    emit(f"faults {faults}")


def back_up(emit: Emit, path: str) -> None:
    """Write a store, checkpoint it and restore the checkpoint. Report each step, then wait to be killed."""
    base = Path(path)
    store = with_rows(base / "store")
    emit("stored")
    store.write(batch_of(CONFIRMED))
    store.checkpoint(base / "copy")
    emit("copied")
    restore(base / "copy", base / "back")
    emit("restored")
    threading.Event().wait(60)


def look(emit: Emit, path: str) -> None:
    _look(emit, Path(path))
