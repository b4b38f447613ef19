"""Store paths: a store, a virtual host's directory, or a broker's directory with a virtual host."""

from __future__ import annotations

from pathlib import Path

import pytest

import basaltmq
from basaltmq.broker.vhost_directory import VHostDirectories
from basaltmq.errors import NotFoundError
from basaltmq.pipeline.store_path import store_path

pytestmark = pytest.mark.spec("F1")


def test_every_form_of_path_finds_the_store(tmp_path: Path) -> None:
    basaltmq.open(tmp_path / "own").close()
    assert store_path(tmp_path / "own") == tmp_path / "own"
    made = VHostDirectories(tmp_path / "node")
    for name in ("/", "other"):
        store = made.make(name)
        assert store_path(tmp_path / "node", name) == store
        assert store_path(store.parent) == store
    with pytest.raises(NotFoundError, match="no vhost 'none'; it has "):
        store_path(tmp_path / "node", "none")
    with pytest.raises(NotFoundError, match="there is no store at"):
        store_path(tmp_path / "nothing")
