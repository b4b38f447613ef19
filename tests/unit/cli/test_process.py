"""`basalt` as a separate process: signals, pipes, and an output that cannot be written."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import pytest
from tests.unit.cli.conftest import Basalt

import basaltmq
from basaltmq.cli.line_batches import line_batches

WAIT_S = 60.0


def started(data: Path, words: Sequence[str], temp: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "basaltmq.cli", "--data-dir", str(data), *words],
        env={**os.environ, "TMPDIR": str(temp)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.promise("P8")
def test_a_terminated_follower_leaves_no_files(basalt: Basalt, data: Path, tmp_path: Path) -> None:
    basalt("topic", "create", "orders")
    basalt("topic", "append", "orders", "--raw", stdin="one\n")
    temp = tmp_path / "temp"
    temp.mkdir()
    with started(data, ("topic", "read", "orders", "--raw", "--follow"), temp) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"one\n"
        assert list(temp.iterdir())
        follower.send_signal(signal.SIGTERM)
        _, said = follower.communicate(timeout=WAIT_S)
    assert (follower.returncode, said) == (128 + signal.SIGTERM, b"")
    assert not list(temp.iterdir())


def test_input_before_a_pause_is_written_when_the_command_is_terminated(
    basalt: Basalt, data: Path, tmp_path: Path
) -> None:
    basalt("topic", "create", "orders")
    with started(data, ("topic", "append", "orders", "--raw"), tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\nhal")
        process.stdin.flush()
        # The process prints nothing before its end, so read the records themselves.
        for _ in range(int(WAIT_S * 20)):
            if basalt("topic", "read", "orders", "--raw").stdout.splitlines() == ["one", "two"]:
                break
            signal.sigtimedwait([], 0.05)
        # Not SIGINT, which background processes ignore.
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=WAIT_S)
    assert said.startswith(b"2 records appended to orders\n")
    assert b"Traceback" not in said
    assert process.returncode != 0
    assert basalt("topic", "read", "orders", "--raw").stdout == "one\ntwo\n"


def test_an_output_error_is_one_line_without_a_traceback(basalt: Basalt, data: Path) -> None:
    basaltmq.open(data).close()
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "basaltmq.cli", "--data-dir", str(data), "topic", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=WAIT_S,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"error [system]: ")
    assert ended.stderr.count(b"\n") == 1
    assert b"No space left on device" in ended.stderr


def test_input_is_read_as_numbered_lines_in_batches_that_end_at_limits_and_pauses() -> None:
    text = b"".join(b"%d\n" % each for each in range(100_000)) + b"\nlast"
    found = list(line_batches(cast(BinaryIO, io.BytesIO(text)), 1_000, 1 << 20))
    assert [line for portion in found for line in portion] == list(enumerate(text.split(b"\n"), 1))
    assert [len(portion) for portion in found[:-1]] == [1_000] * (len(found) - 1)
    by_bytes = list(line_batches(cast(BinaryIO, io.BytesIO(b"aaaa\nbbbb\ncc")), 10, 4))
    assert by_bytes == [[(1, b"aaaa")], [(2, b"bbbb")], [(3, b"cc")]]
    read, write = os.pipe()
    with open(read, "rb") as source, open(write, "wb", buffering=0) as pipe:
        pipe.write(b"one\ntwo\nth")
        coming = line_batches(source, 1_000, 1 << 20)
        assert next(coming) == [(1, b"one"), (2, b"two")]
        pipe.write(b"ree\nfour")
        pipe.close()
        assert list(coming) == [[(3, b"three"), (4, b"four")]]
