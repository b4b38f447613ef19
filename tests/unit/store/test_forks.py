"""A forked child cannot write to its parent's store, does not block on it, and does not keep it locked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from basaltmq.store.families import Family
from basaltmq.store.open import open_store

WAIT_S = 60

PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from basaltmq.errors import StoreClosedError
from basaltmq.store.batch import Batch
from basaltmq.store.sync.group_commit import GroupCommit
from basaltmq.store.families import Family
from basaltmq.store.open import open_store, open_view

def row(key):
    batch = Batch()
    batch.put(Family.STATE, key, bytes(1000))
    return batch

def refused(call, words):
    try:
        call()
    except StoreClosedError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{call} went through")

def commit(key):
    store.write(row(key))
    group.wait_durable()

async def durable():
    await group.durable()

path = Path(sys.argv[1])
store = open_store(path)
group = GroupCommit(store)
for number in range(50):
    commit(b"%03d" % number)
scan = store.scan(Family.STATE)
next(scan)
child = os.fork()
if child == 0:
    signal.alarm(30)
    words = f"was opened by process {os.getppid()}; a forked child cannot use it"
    refused(lambda: store.write(row(b"child")), words)
    refused(lambda: store.get(Family.STATE, b"000"), words)
    refused(lambda: store.scan(Family.STATE), words)
    refused(store.sync, words)
    refused(group.wait_durable, "not confirmed")
    refused(lambda: asyncio.run(durable()), "not confirmed")
    group.close()
    store.close()
    view = open_view(path)
    assert view.get(Family.STATE, b"049") is not None
    view.close()
    os._exit(7)  # RocksDB blocks in exit() of a forked child. Children of multiprocessing do not call it either.
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
for number in range(50, 100):
    commit(b"%03d" % number)
lasting = os.fork()
if lasting == 0:
    os.close(1)
    signal.alarm(30)
    signal.pause()
print(lasting, flush=True)
sys.stdin.readline()
group.close()
store.close()
open_store(path).close()
print("opened again", flush=True)
sys.stdin.readline()
"""


@pytest.mark.promise("P1")
def test_a_forked_child_neither_damages_nor_locks_the_store(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent, parent.stdin as say, parent.stdout as reported:
        lasting = int(reported.readline())
        try:
            shutil.copytree(tmp_path / "store", tmp_path / "crashed")
            # The parent closes and reopens the store while the child is alive.
            say.write("go on\n")
            say.flush()
            assert reported.readline() == "opened again\n"
            say.close()
            assert parent.wait(WAIT_S) == 0
        finally:
            os.kill(lasting, 9)
    crashed = open_store(tmp_path / "crashed")
    assert [key for key, _ in crashed.scan(Family.STATE)] == [b"%03d" % number for number in range(100)]
    crashed.close()
