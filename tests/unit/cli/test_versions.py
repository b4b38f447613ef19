"""Stores of another version: an older one is upgraded, a newer one is refused with both versions named."""

from __future__ import annotations

import tarfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures import catalog_v1
from tests.unit.cli.conftest import Basalt

import basaltmq
from basaltmq.catalog import configuration
from basaltmq.queues import boot
from basaltmq.store.batch import Batch
from basaltmq.store.directory import FORMAT_VERSION, MARKER, read_marker
from basaltmq.store.open import open_store
from basaltmq.store.versions import put_version, read_version

pytestmark = pytest.mark.spec("A9")

FIXTURES = Path(catalog_v1.__file__).parent


@pytest.mark.parametrize(
    ("content", "current", "command"),
    [
        (boot.CONTENT, boot.VERSION, ("queue", "create", "more")),
        (configuration.VERSION_NAME, configuration.VERSION, ("topic", "create", "more")),
    ],
)
def test_newer_data_is_refused_with_both_versions_and_not_changed(
    basalt: Basalt, data: Path, content: str, current: int, command: tuple[str, ...]
) -> None:
    basalt("queue", "create", "jobs")
    basalt("topic", "create", "orders")
    write_version(data, content, current + 4)
    error = basalt(*command, code=1).stderr
    assert f"{content} is at version {current + 4}, but this Basalt reads up to version {current}" in error
    write_version(data, content, current)
    assert "jobs" in basalt("queue", "list").output
    assert "orders" in basalt("topic", "list").output


def write_version(path: Path, content: str, version: int) -> None:
    with closing(open_store(path)) as store:
        batch = Batch()
        put_version(batch, content, version)
        store.write(batch)
        store.sync()


@pytest.mark.parametrize("command", [("queue", "list"), ("store", "info"), ("queue", "create", "more")])
def test_a_newer_directory_is_refused_with_both_versions(basalt: Basalt, data: Path, command: tuple[str, ...]) -> None:
    basalt("queue", "create", "jobs")
    marker = data / MARKER
    said = read_marker(data)
    assert said is not None
    marker.write_bytes(replace(said, version=FORMAT_VERSION + 6).encode())
    error = basalt(*command, code=1).stderr
    assert f"directory version {FORMAT_VERSION + 6}, but this Basalt reads up to version {FORMAT_VERSION}" in error
    marker.write_bytes(said.encode())
    assert "jobs" in basalt("queue", "list").output


def test_configuration_of_version_1_is_upgraded_when_the_store_is_opened(basalt: Basalt, data: Path) -> None:
    with tarfile.open(FIXTURES / "configuration-v1.tar.gz") as archive:
        archive.extractall(data, filter="data")
    with closing(open_store(data)) as store:
        assert read_version(store, configuration.VERSION_NAME) in (None, 1)
    basalt("topic", "create", "orders")
    with closing(open_store(data)) as store:
        assert read_version(store, configuration.VERSION_NAME) == configuration.VERSION
    with basaltmq.open(data) as db:
        assert [topic.name for topic in db.topics()] == ["orders"]
        assert db.topic("orders").append(b"x").offset == 0
