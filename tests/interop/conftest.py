"""Brokers for tests: one shared by a module, or one of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.server import Broker, running


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A running broker, shared by the tests of a module; use names of your own in it."""
    with running(tmp_path_factory.mktemp("broker") / "data") as started:
        yield started


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[Broker]:
    """A running broker of the test's own, to be stopped, killed and started again."""
    with running(tmp_path / "data") as started:
        yield started
