"""A broker with Kafka's listener, shared by a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.interop.server import Broker, running


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("kafka")
    with running(folder / "data", "--kafka-enabled=true", "--kafka-port=0", "--fila-enabled=false") as started:
        yield started
