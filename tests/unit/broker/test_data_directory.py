"""Modes of a data directory and of the files that the broker creates in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from basaltmq.broker.data_directory import protect
from basaltmq.store.directory import make_directory


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def made_in(path: Path) -> tuple[int, int]:
    """Return the modes of a directory and a file that the process creates there."""
    (path / "folder").mkdir()
    (path / "file").write_bytes(b"x")
    return mode_of(path / "folder"), mode_of(path / "file")


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    data = tmp_path / "deep" / "data"
    assert protect(data) is None
    make_directory(data)
    assert mode_of(data) == 0o700
    assert made_in(data) == (0o700, 0o600)


def test_a_store_of_an_embedded_program_is_private_whatever_the_umask(tmp_path: Path) -> None:
    make_directory(tmp_path / "store")
    assert mode_of(tmp_path / "store") == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o770, 0o701])
def test_a_directory_accessible_to_others_is_restricted_and_named(tmp_path: Path, mode: int) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(mode)
    assert f"{data} from {mode:04o} to 0700" in str(protect(data))
    assert mode_of(data) == 0o700
    assert made_in(data) == (0o700, 0o600)
    assert protect(data) is None


def test_a_directory_with_other_files_is_reported_and_unchanged(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letters").write_text("not ours")
    assert "It contains other files" in str(protect(tmp_path))
    assert mode_of(tmp_path) == 0o755


def test_a_directory_for_its_group_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    data.chmod(0o750)
    assert protect(data) is None
    assert mode_of(data) == 0o750
    assert made_in(data) == (0o750, 0o640)


def test_a_mode_that_cannot_be_changed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refused)
    tmp_path.joinpath("data").mkdir(mode=0o755)
    assert "other users can read its data" in str(protect(tmp_path / "data"))
