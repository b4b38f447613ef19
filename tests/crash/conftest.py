"""Fixture: one fork server per worker, with the fault shim loaded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.crash.harness import Forge, compile_shim


@pytest.fixture(scope="session")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forge]:
    with Forge(compile_shim(tmp_path_factory.mktemp("shim"))) as forge:
        yield forge
