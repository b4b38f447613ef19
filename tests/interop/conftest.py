"""Brokers for tests: one per module, or one per test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.server import Broker, running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Start a broker that the tests of a module share. Each test uses its own names."""
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        yield started


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """Start a broker for one test, which may stop, kill and restart it."""
    with running(tmp_path / "data") as started:
        yield started
