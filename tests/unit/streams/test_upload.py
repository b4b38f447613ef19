"""Parts received over the network: their expanded size is known before anything is decoded."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

from basaltmq.errors import InvalidArgumentError, LimitExceededError
from basaltmq.streams.adapter import BATCH_RECORDS_MAX
from basaltmq.streams.imports.arrow_file import is_compressed
from basaltmq.streams.imports.stage import SCHEMA
from basaltmq.streams.imports.upload import CHUNKS, open_upload, pack

pytestmark = pytest.mark.spec("F1")


def rows(count: int, value: bytes = b"v") -> pa.RecordBatch:
    columns = [
        pa.nulls(count, pa.binary()),
        pa.array([value] * count, pa.binary()),
        pa.nulls(count, SCHEMA.field("headers").type),
        pa.array([1] * count).cast(SCHEMA.field("timestamp").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def compressed(codec: str, batch: pa.RecordBatch, *before: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    reported = b"[%s]" % b",".join(b'["t",0,%d]' % each.num_rows for each in (*before, batch))
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.ipc.new_file(sink, SCHEMA.with_metadata({CHUNKS: reported}), options=options) as writer:
        for each in (*before, batch):
            writer.write_batch(each)
    return bytes(sink.getvalue())


def opened(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    open_upload(path).check(lambda _: 1 << 20)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_compressed_part_is_refused_before_it_is_decoded(tmp_path: Path, codec: str) -> None:
    raw = compressed(codec, rows(1000, bytes(10_000)))
    assert len(raw) < 100_000
    before = pa.total_allocated_bytes()
    with pytest.raises(InvalidArgumentError, match="the part is compressed"):
        opened(tmp_path / "part", raw)
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_an_uncompressed_part_is_accepted(tmp_path: Path) -> None:
    opened(tmp_path / "part", pack([("t", 0, rows(10)), ("u", 1, rows(3, b"x" * 1000))]))


def test_a_chunk_over_the_append_limits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LimitExceededError, match=r"chunk 1 has 100001 records .* split it into more chunks"):
        opened(tmp_path / "part", pack([("t", 0, rows(1)), ("t", 0, rows(BATCH_RECORDS_MAX + 1))]))


def test_arbitrary_bytes_are_refused_with_a_one_line_error(tmp_path: Path) -> None:
    rng = random.Random(7)
    whole = pack([("t", 0, rows(5)), ("t", 0, rows(4))])
    for turn in range(400):
        raw = bytearray(whole)
        if turn % 2:
            del raw[rng.randrange(len(raw)) :]
        # Positions in the footer and in the messages.
        for _ in range(rng.randrange(1, 4)):
            if raw:
                raw[rng.randrange(max(0, len(raw) - 400), len(raw))] = rng.randrange(256)
        reported = [
            refusal(partial(is_compressed, memoryview(raw))),
            refusal(partial(opened, tmp_path / "part", bytes(raw))),
        ]
        assert not [each for each in reported if "\n" in each]


def refusal(look: Callable[[], object]) -> str:
    """Return the error for some bytes. Unexpected errors propagate."""
    try:
        look()
    except (InvalidArgumentError, LimitExceededError, ValueError) as error:
        return str(error)
    return ""
