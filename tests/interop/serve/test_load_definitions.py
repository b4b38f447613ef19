"""Definitions at start: a broker in a container has the objects of its file before the first client connects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.interop.server import ROOT, running

from basaltmq.http_client import path

FILE = ROOT / "tests" / "fixtures" / "rabbitmq_definitions.json"


def test_definitions_are_loaded_at_every_start_and_messages_are_kept(tmp_path: Path) -> None:
    with running(tmp_path / "data", f"--load-definitions={FILE}") as broker:
        shop = broker.api("shop", "shop-password")
        body = {"routing_key": "order.x", "payload": "kept", "properties": {"delivery_mode": 2}}
        assert shop.post(path("exchanges", "shop", "events", "publish"), body) == {"routed": True}
        assert "skipped: parameter 'elsewhere' of federation-upstream" in broker.log()
        assert broker.stop() == 0
        broker.start()
        assert broker.call("GET", path("queues", "shop", "orders"))["messages"] == 1


@pytest.mark.parametrize(("text", "said"), [(None, "No such file"), ("{", "is not a valid definitions file")])
def test_an_invalid_definitions_file_prevents_the_start(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "definitions.json"
    if text is not None:
        file.write_text(text)
    flags = [f"--data-dir={tmp_path / 'data'}", f"--load-definitions={file}", "--amqp-port=0", "--admin-port=0"]
    done = subprocess.run(
        [sys.executable, "-m", "basaltmq.cli", "serve", *flags, "--fila-enabled=no", "--kafka-enabled=no"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 78
    assert any("error [invalid_config]" in line and said in line for line in done.stderr.splitlines()), done.stderr
