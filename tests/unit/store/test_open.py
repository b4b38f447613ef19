"""Directories that open refuses: each with its own error, and none is changed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rocksdict import Options, Rdict
from tests.crash.harness import Forge, Shim, compile_shim

from basaltmq.errors import (
    BasaltError,
    CorruptionError,
    NotAStoreError,
    StoreLockedError,
    StoreNotFoundError,
    StoreReadOnlyError,
    StoreTooNewError,
    UnknownFamilyError,
)
from basaltmq.store.batch import Batch
from basaltmq.store.directory import encode_line
from basaltmq.store.families import Family
from basaltmq.store.open import open_store, open_view


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(compile_shim(tmp_path_factory.mktemp("shim"))) as forge:
        yield forge


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    store = open_store(path)
    batch = Batch()
    batch.put(Family.QUEUES, b"key", b"value")
    batch.put(Family.STREAM_RECORDS, b"key", b"v" * 10_000)
    store.write(batch)
    store.close()
    # LOCK as another process left it, so that a premature claim is detected.
    (path / "LOCK").write_text("1\n")
    return path


def tree(path: Path) -> dict[str, bytes | None]:
    """Return the content of every file below `path`, by name."""
    return {str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")}


def refused(path: Path, kind: type[BasaltError], match: str, *, create: bool = True) -> None:
    """Assert that both ways to open raise the same error and change nothing."""
    before = tree(path.parent)
    with pytest.raises(kind, match=match):
        open_store(path, create=create)
    assert tree(path.parent) == before
    if kind not in (StoreLockedError, StoreReadOnlyError):
        with pytest.raises(kind, match=match):
            open_view(path)
        assert tree(path.parent) == before


def rewrite_marker(home: Path, **changes: object) -> None:
    said = {"format": "basalt-store", "version": 1, "store_id": "12345678-1234-5678-1234-567812345678", **changes}
    (home / "STORE").write_bytes(encode_line(said))


def test_a_missing_store_is_refused_without_create(tmp_path: Path) -> None:
    refused(tmp_path / "missing", StoreNotFoundError, "missing", create=False)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", StoreNotFoundError, "empty", create=False)


def test_a_file_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("hello")
    refused(tmp_path / "file", NotAStoreError, "is a file")
    refused(tmp_path / "file" / "below", NotAStoreError, f"{tmp_path / 'file'} is a file")


def test_a_foreign_directory_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    refused(tmp_path / "photos", NotAStoreError, r"cat\.jpg")


def test_files_of_file_systems_and_tools_do_not_prevent_creation(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".DS_Store").touch()
    open_store(tmp_path).close()
    assert (tmp_path / "STORE").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".bashrc").touch()
    refused(tmp_path / "home", NotAStoreError, "bashrc")


def test_a_marker_of_another_format_is_not_a_store(home: Path) -> None:
    rewrite_marker(home, format="other")
    refused(home, NotAStoreError, "'other'")


def test_a_marker_that_is_a_directory_is_not_a_store(home: Path) -> None:
    (home / "STORE").unlink()
    (home / "STORE").mkdir()
    refused(home, NotAStoreError, "STORE is a directory")


def test_a_newer_store_is_refused_by_both_versions(home: Path) -> None:
    rewrite_marker(home, version=7)
    refused(home, StoreTooNewError, "version 7, but this Basalt reads up to version 1")


@pytest.mark.promise("P7")
@pytest.mark.parametrize("raw", [b"", b"\0" * 102, b"deadbeef {}\n", b"x" * 5000])
def test_a_damaged_marker_is_named(home: Path, raw: bytes) -> None:
    (home / "STORE").write_bytes(raw)
    refused(home, CorruptionError, "STORE does not match its checksum; restore")


@pytest.mark.parametrize(
    "changes", [{"version": 0}, {"version": "1"}, {"version": None}, {"store_id": "x"}, {"store_id": 5}]
)
def test_a_marker_with_invalid_content_is_refused(home: Path, changes: dict[str, object]) -> None:
    rewrite_marker(home, **changes)
    refused(home, CorruptionError, "STORE")


def test_an_unknown_family_is_named(home: Path) -> None:
    families = {name: Options(raw_mode=True) for name in Rdict.list_cf(str(home / "kv"))}
    db = Rdict(str(home / "kv"), Options(raw_mode=True), families)
    db.create_column_family("from_the_future", Options(raw_mode=True)).close()
    db.close()
    (home / "SEALS").unlink()
    refused(home, UnknownFamilyError, "from_the_future")


def test_a_second_open_in_one_process_is_refused_at_once(home: Path) -> None:
    store = open_store(home)
    try:
        refused(home, StoreLockedError, f"in this process \\({os.getpid()}\\)")
    finally:
        store.close()
    open_store(home).close()


def test_a_second_process_is_refused_at_once_and_can_open_after_the_first_ends(home: Path, forge: Forge) -> None:
    child = forge.start("tests.crash.faults:hold", str(home))
    assert next(child.lines(30)) == "open"
    refused(home, StoreLockedError, f"by process {child.pid}; stop it, or open the store read-only")
    view = open_view(home)
    assert view.get(Family.QUEUES, b"key") == b"value"
    view.close()
    child.kill()
    child.close()
    open_store(home).close()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_read_only_file_system_is_named_and_unchanged(home: Path, forge: Forge, code: int) -> None:
    shim = Shim.beside(home)
    before = tree(home)
    said = forge.run("tests.crash.faults:open_on", str(home), str(shim.control), code, shim=shim)
    assert [line.split()[1] for line in said] == ["StoreReadOnlyError"] * 2, said
    assert "read-only" in said[0]
    assert tree(home) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user who may not write")
def test_a_directory_of_another_user_is_named_and_unchanged(home: Path, forge: Forge) -> None:
    with tempfile.TemporaryDirectory() as public:
        os.chmod(public, 0o755)  # noqa: S103
        path = Path(shutil.copytree(home, Path(public) / "store"))
        before = tree(path)
        (said,) = forge.run("tests.crash.faults:open_as_nobody", str(path))
        assert said.startswith("open StoreReadOnlyError"), said
        assert tree(path) == before


@pytest.mark.promise("P1", "P7")
def test_a_missing_current_file_does_not_create_an_empty_store(home: Path) -> None:
    (home / "kv" / "CURRENT").unlink()
    refused(home, CorruptionError, "CURRENT is missing")


def read_all(home: Path) -> None:
    store = open_store(home)
    try:
        for family in Family:
            list(store.scan(family))
    finally:
        store.close()


@pytest.mark.promise("P7")
@pytest.mark.parametrize("kind", ["MANIFEST-*", "*.sst", "*.blob"])
def test_a_missing_file_is_named_at_open_or_at_the_first_read_of_it(home: Path, kind: str) -> None:
    (path,) = list((home / "kv").glob(kind))[:1]
    path.unlink()
    with pytest.raises(CorruptionError, match=path.name):
        read_all(home)


@pytest.mark.parametrize("text", ['{"raw_mode":false,"prefix_extractors":{}}', "", "nonsense", None])
def test_a_wrong_rocksdict_config_does_not_change_how_rows_are_read(home: Path, text: str | None) -> None:
    config = home / "kv" / "rocksdict-config.json"
    if text is None:
        config.unlink()
    else:
        config.write_text(text)
    reports: list[str] = []
    store = open_store(home, report=reports.append)
    assert store.get(Family.QUEUES, b"key") == b"value"
    store.close()
    assert len(reports) == 1
    assert "rocksdict-config.json" in reports[0]
    store = open_store(home, report=reports.append)
    assert store.get(Family.QUEUES, b"key") == b"value"
    store.close()
    assert len(reports) == 1


def test_a_crash_during_creation_leaves_a_store_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "store"
    open_store(path).close()
    (path / "SEALS").unlink()
    for each in (path / "kv").iterdir():
        if each.name.startswith(("CURRENT", "OPTIONS")) or each.suffix == ".log":
            each.unlink()
    store = open_store(path)
    assert list(store.scan(Family.QUEUES)) == []
    store.close()
    shutil.rmtree(path / "kv")
    (path / "SEALS").unlink()
    open_store(path).close()


@pytest.mark.promise("P1", "P7")
def test_a_missing_database_is_not_created_again(home: Path) -> None:
    shutil.rmtree(home / "kv")
    refused(home, CorruptionError, "CURRENT is missing")


def test_a_damaged_seals_file_is_reported_and_written_again(home: Path) -> None:
    (home / "SEALS").write_bytes(b"junk")
    reports: list[str] = []
    open_store(home, report=reports.append).close()
    assert len(reports) == 1
    assert "SEALS" in reports[0]
    open_store(home, report=reports.append).close()
    assert len(reports) == 1
