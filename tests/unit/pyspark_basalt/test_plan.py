"""Query planning over a real store without Spark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import basaltmq
from basaltmq.errors import DataLossError, InvalidArgumentError, TopicNotFoundError
from basaltmq.streams.view import StreamView
from pyspark_basalt.options import ReadOptions, parse
from pyspark_basalt.plan import Piece, limited, partitions_of, pieces, resolve
from pyspark_basalt.rows import read_piece

pytestmark = pytest.mark.spec("F1")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with basaltmq.open(tmp_path / "data") as db:
        orders = db.topic("orders", partitions=2)
        for partition in (0, 1):
            orders.append([b"%d" % i for i in range(10 + partition)], partition=partition)
        db.topic("clicks", partitions=1)
    return tmp_path / "data"


@pytest.fixture
def view(store: Path) -> Iterator[StreamView]:
    with StreamView.open(store) as opened:
        yield opened


def options(store: Path, **given: str) -> ReadOptions:
    return parse({"path": str(store), **given})


def planned(view: StreamView, asked: ReadOptions) -> list[Piece]:
    which = partitions_of(view, asked)
    start, _ = resolve(view, asked.start, which, which_end="from")
    return pieces(view, start, resolve(view, asked.end, which, which_end="to")[0], asked)


def piece(view: StreamView, topic: str, number: int, begin: int, end: int) -> Piece:
    meta = view.info(topic, number).meta
    return Piece(topic, number, begin, end, meta.number, str(meta.topic_id))


def test_topics_are_found_by_name_pattern_and_assignment(view: StreamView, store: Path) -> None:
    every = [("clicks", 0), ("orders", 0), ("orders", 1)]
    assert partitions_of(view, options(store, subscribe="clicks,orders")) == every
    assert partitions_of(view, options(store, subscribePattern=".*s")) == every
    assert partitions_of(view, options(store, subscribePattern="order")) == []
    assert partitions_of(view, options(store, assign='{"orders": [1]}')) == [("orders", 1)]


def test_error_names_a_missing_topic_and_the_existing_ones(view: StreamView, store: Path) -> None:
    with pytest.raises(TopicNotFoundError, match=r"no topic 'oders'.*there are clicks, orders"):
        partitions_of(view, options(store, subscribe="oders"))
    with pytest.raises(InvalidArgumentError, match="partitions 0 to 1, not 2"):
        partitions_of(view, options(store, assign='{"orders": [2]}'))


def test_pieces_cover_the_range_once(view: StreamView, store: Path) -> None:
    for given in ({}, {"minPartitions": "7"}, {"maxRecordsPerPartition": "3"}, {"maxBytesPerPartition": "16"}):
        found = planned(view, options(store, subscribe="orders", **given))
        for partition, count in ((0, 10), (1, 11)):
            covered = [at for p in found if p.partition == partition for at in range(p.begin, p.end)]
            assert covered == list(range(count)), given
        assert len(found) == 2 if not given else len(found) > 2


def test_given_offsets_are_used_and_invalid_ones_refused(view: StreamView, store: Path) -> None:
    asked = options(
        store, assign='{"orders": [0]}', startingOffsets='{"orders": {"0": 3}}', endingOffsets='{"orders": {"0": 6}}'
    )
    assert planned(view, asked) == [piece(view, "orders", 0, 3, 6)]
    with pytest.raises(InvalidArgumentError, match=r"ends at offset 10; it cannot be read from offset 11"):
        planned(view, options(store, assign='{"orders": [0]}', startingOffsets='{"orders": {"0": 11}}'))
    with pytest.raises(InvalidArgumentError, match=r"not read: orders\[1\]"):
        planned(view, options(store, assign='{"orders": [0]}', startingOffsets='{"orders": {"1": 1}}'))


def test_records_removed_by_retention_are_an_error_or_skipped(store: Path) -> None:
    with basaltmq.open(store) as db:
        db.topic("orders").delete_before(0, 4)
    with StreamView.open(store) as view:
        asked = options(store, assign='{"orders": [0]}', startingOffsets='{"orders": {"0": 1}}')
        with pytest.raises(DataLossError, match="begins at offset 4, expected 1: offsets 1 to 3 were removed"):
            planned(view, asked)
        lenient = options(
            store, assign='{"orders": [0]}', startingOffsets='{"orders": {"0": 1}}', failOnDataLoss="false"
        )
        assert planned(view, lenient) == [piece(view, "orders", 0, 4, 10)]
        batches = list(read_piece(view, Piece("orders", 0, 1, 10), lenient))
        assert [v for b in batches for v in b.column("offset").to_pylist()] == list(range(4, 10))


def test_rows_have_all_columns_and_end_with_the_piece(view: StreamView, store: Path) -> None:
    asked = options(store, subscribe="orders", includeHeaders="true", batchRows="2")
    batches = list(read_piece(view, Piece("orders", 1, 2, 7), asked))
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert [(r["topic"], r["partition"], r["offset"], r["value"], r["headers"]) for r in rows] == [
        ("orders", 1, at, b"%d" % at, []) for at in range(2, 7)
    ]


def test_trigger_limit_is_shared_by_partitions_in_proportion() -> None:
    start = {"a": {0: 0, 1: 100}}
    latest = {"a": {0: 9_000, 1: 110}}
    ends = limited(start, latest, 100)
    assert 0 < ends["a"][0] <= 100
    assert 100 < ends["a"][1] <= 110
    assert limited(start, latest, 10_000) == latest
    while start != latest:
        start = limited(start, latest, 1_000)
