"""Scratch directories are removed after the process that created them has ended in any way."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from basaltmq.store.open import open_store, open_view
from basaltmq.store.scratch import LIVE, UNFINISHED_S, Scratch, sweep

HOLD_A_VIEW = """
import sys
from basaltmq.store.open import open_view
view = open_view(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_directory_is_removed_by_call_context_exit_or_garbage_collection(temp: Path) -> None:
    with Scratch("verify") as left:
        assert [each.name for each in left.path.iterdir()] == [LIVE]
    kept, dropped = Scratch("index"), Scratch("view")
    kept.remove()
    kept.remove()
    assert list(temp.iterdir()) == [dropped.path]
    del dropped
    gc.collect()
    assert not list(temp.iterdir())


@pytest.mark.promise("P8")
def test_a_garbage_collected_view_leaves_neither_directory_nor_open_files(temp: Path, tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        view = open_view(tmp_path / "store")
        del view
    gc.collect()
    assert not list(temp.iterdir())
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("ending", [signal.SIGKILL, None])
def test_the_directory_of_a_killed_process_is_swept_but_not_that_of_a_live_one(
    temp: Path, tmp_path: Path, ending: signal.Signals | None
) -> None:
    open_store(tmp_path / "store").close()
    environment = {**os.environ, "TMPDIR": str(temp)}
    command = [sys.executable, "-c", HOLD_A_VIEW, str(tmp_path / "store")]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        [theirs] = temp.iterdir()
        with Scratch("view") as ours:
            assert set(temp.iterdir()) == {theirs, ours.path}
        if ending is None:
            process.communicate(timeout=60)
            assert not list(temp.iterdir()), "a program that exits without closing its view"
        else:
            process.send_signal(ending)
            process.communicate(timeout=60)
            assert list(temp.iterdir()) == [theirs]
    with Scratch("view") as after:
        assert list(temp.iterdir()) == [after.path]


def test_only_own_directories_of_ended_processes_are_swept(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("basalt-view-making", "basalt-view-abandoned", "basalt-other-thing"):
        (temp / name).mkdir()
    (temp / "basalt-view-file").write_text("not a folder")
    (temp / "basalt-view-link").symlink_to(temp / "basalt-other-thing")
    (temp / "basalt-other-thing" / LIVE).touch()
    old = (temp / "basalt-view-abandoned").stat().st_mtime - UNFINISHED_S - 60
    os.utime(temp / "basalt-view-abandoned", (old, old))
    sweep()
    kept = {"basalt-view-making", "basalt-other-thing", "basalt-view-file", "basalt-view-link"}
    assert {each.name for each in temp.iterdir()} == kept
    (temp / "basalt-view-making" / LIVE).touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep()
    assert (temp / "basalt-view-making").exists(), "a directory of another user"
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    sweep()
    assert not (temp / "basalt-view-making").exists()


def test_an_interrupted_removal_is_completed_by_the_next_process(temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Scratch("view")
    for name in ("a", "b"):
        (ours.path / name).write_text("something")
    real, removed = os.unlink, 0

    def killed_later(path: str) -> None:
        nonlocal removed
        if removed:
            raise KeyboardInterrupt
        removed += 1
        real(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed_later)
        with pytest.raises(KeyboardInterrupt):
            ours.remove()
    assert len(list(ours.path.iterdir())) == 2, "one of the two files, and LIVE"
    os.close(_descriptor_of(ours.path / LIVE))
    sweep()
    assert not list(temp.iterdir())


def _descriptor_of(path: Path) -> int:
    [found] = [int(each) for each in os.listdir("/proc/self/fd") if _leads_to(each, path)]
    return found


def _leads_to(descriptor: str, path: Path) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(path)
    except FileNotFoundError:
        return False


def test_a_forked_child_does_not_remove_its_parents_directory(temp: Path) -> None:
    with Scratch("view") as ours:
        child = os.fork()
        if child == 0:
            ours.remove()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sweep()
        assert (ours.path / LIVE).exists()
