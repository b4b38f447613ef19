"""Jobs about records and dead letters: dedup, latest, profile, dlq report and redrive; the index by tasks of Spark."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import basaltmq
from basaltmq.cli.main import main
from basaltmq.errors import InvalidArgumentError
from basaltmq.log.batches.record import Record
from basaltmq.pipeline.dedup import DedupJob, dedup
from basaltmq.pipeline.dlq import STAMP, RedriveJob, redrive
from basaltmq.pipeline.latest import LatestJob, latest
from basaltmq.pipeline.profile import ProfileJob, fields_of, profile
from basaltmq.pipeline.reports.pages import profile_page
from basaltmq.pipeline.sink import Sink
from basaltmq.store.families import Family
from basaltmq.store.open import open_store

pytestmark = [pytest.mark.spec("F2", "F3"), pytest.mark.timeout(400), pytest.mark.xdist_group("spark")]


def basalt(data: Path, *arguments: str, code: int = 0) -> str:
    reported = CliRunner().invoke(main, ["--data-dir", str(data), "pipeline", *arguments])
    assert reported.exit_code == code, reported.output
    return reported.stdout


def test_records_without_copies_and_the_newest_and_what_there_is(spark: SparkSession, tmp_path: Path) -> None:
    data = tmp_path / "data"
    values = [(b"a", 0), (b"b", 10), (b"a", 20), (b"a", 25), (b"c", 90), (b"a", 200)]
    with basaltmq.open(data) as db:
        topic = db.topic("t", partitions=1)
        topic.append([Record(b'{"k": "%s", "n": %d}' % (key, at), key, timestamp_ms=1000 * at) for key, at in values])
        topic.append([Record(b"no json", None, timestamp_ms=1), Record(b"no json", None, timestamp_ms=2)])
        topic.append(Record(None, b"b", timestamp_ms=300_000))
        db.topic("out", partitions=2)
    source, location = {"path": str(data), "subscribe": "t"}, {"path": str(data)}

    job = DedupJob(
        source=source, to=Sink(topic="out", location=location), window_s=60, checkpoint=str(tmp_path / "run")
    )
    done = dedup(spark, job)
    assert (done.read, done.kept, done.duplicates) == (9, 7, 2)
    assert dedup(spark, job).run == done.run
    with basaltmq.open(data) as db:
        found = [(record.key, record.timestamp_ms) for number in (0, 1) for record in db.topic("out").read(number)]
    stays = [(b"a", 0), (b"a", 200_000), (b"b", 10_000), (b"b", 300_000), (b"c", 90_000), (None, 1), (None, 2)]
    assert sorted(found, key=lambda each: (each[0] or b"~", each[1])) == stays, "written once, though run twice"
    by_value = json.loads(basalt(data, "dedup", "--topics", "t", "--by", "value", "--dry-run", "--json"))
    assert by_value[0]["duplicates"] == 1

    folder = tmp_path / "newest"
    assert latest(spark, LatestJob(source=source, to=Sink(parquet=str(folder)))).keys == 2
    rows = spark.read.parquet(str(folder)).collect()
    assert sorted((bytes(row.key), row.offset) for row in rows) == [(b"a", 5), (b"c", 4)], "b was deleted"
    with pytest.raises(InvalidArgumentError, match="exists and is complete"):
        latest(spark, LatestJob(source=source, to=Sink(parquet=str(folder))))

    reported = profile(spark, ProfileJob(source=source))
    (of,) = reported.topics
    assert (of.records, of.keys_null, of.values_null, of.sampled, of.parsed) == (9, 2, 1, 9, 6)
    assert of.parse_rate == pytest.approx(6 / 8)
    assert [(each.field, each.present, each.least, each.largest) for each in reported.fields] == [
        ("k", 6, "a", "c"),
        ("n", 6, "0", "200"),
    ]
    assert (reported.keys[0].key, reported.keys[0].records) == ("a", 4)
    assert sum(each.records for each in reported.sizes) == sum(each.records for each in reported.hours) == 9
    assert reported.unparsed == ["no json"] * 2
    assert "<svg" in profile_page(reported)

    with closing(open_store(data)) as store:
        before = {key: value for key, value in store.scan(Family.STREAM_INDEX) if key[:1] not in b"PUX"}
    rebuilt = json.loads(basalt(data, "rebuild-index", "--json"))
    assert (rebuilt["findings"], rebuilt["tables"] > 0) == ([], True)
    with closing(open_store(data)) as store:
        assert before == {key: value for key, value in store.scan(Family.STREAM_INDEX) if key[:1] not in b"PUX"}


def test_dead_letters_are_reported_and_sent_back_once(spark: SparkSession, tmp_path: Path) -> None:
    data, checkpoint = tmp_path / "data", str(tmp_path / "redrive")
    with basaltmq.open(data) as db:
        jobs = db.queue("jobs", attempts_max=1, dead_letter_queue="dead")
        for number in range(6):
            jobs.enqueue(b"%d" % number, fairness_key=f"tenant-{number % 2}")
        for message in jobs.lease(6):
            jobs.nack([message], "out of ink" if int(message.payload) < 4 else "no paper")
    page = tmp_path / "dead.html"
    report = json.loads(basalt(data, "dlq", "report", "--html", str(page), "--json", code=2))
    assert [(each["queue"], each["messages"], each["origins"]) for each in report["queues"]] == [("dead", 6, 1)]
    assert [(each["origin"], each["reason"], each["error"], each["messages"]) for each in report["causes"]] == [
        ("jobs", "delivery_limit", "out of ink", 4),
        ("jobs", "delivery_limit", "no paper", 2),
    ]
    assert sum(each["messages"] for each in report["keys"]) == sum(each["messages"] for each in report["hours"]) == 6
    assert "out of ink" in page.read_text()

    where = "error = 'out of ink' AND CAST(value AS STRING) <> '3'"
    job = RedriveJob(path=str(data), queue="dead", where=where, checkpoint=checkpoint)
    basalt(data, "dlq", "redrive", "--queue", "dead", "--where", where, "--checkpoint", checkpoint, "--dry-run")
    assert not (tmp_path / "redrive").exists()

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        redrive(spark, job, stop)
    assert spark.read.parquet(f"{checkpoint}/snapshot").count() == 6, "a snapshot of all comes first"
    with basaltmq.open(data) as db:
        # Arrives after the snapshot, so it is not part of the run.
        jobs = db.queue("jobs")
        jobs.enqueue(b"late")
        jobs.nack(jobs.lease(1), "out of ink")
    done = redrive(spark, job)
    assert (done.dead, done.wanted, done.redriven, done.stayed) == (6, 3, 3, 0)
    with basaltmq.open(data) as db:
        again = db.queue("jobs").lease(10)
        assert sorted(each.payload for each in again) == [b"0", b"1", b"2"]
        assert {each.headers[STAMP] for each in again} == {done.run}
        db.queue("jobs").nack(again, "out of ink")
    last = redrive(spark, job)
    assert (last.run, last.redriven, last.stayed) == (done.run, 0, 0), "what died again is not sent back again"
    with pytest.raises(InvalidArgumentError, match="another redrive"):
        redrive(spark, RedriveJob(path=str(data), queue="dead", checkpoint=checkpoint))


def test_fields_are_told_from_a_schema() -> None:
    nested = "OBJECT<a: BIGINT, `b: c`: ARRAY<OBJECT<x: STRING, y: VOID>>, d: DECIMAL(6,2)>"
    assert fields_of(nested) == [
        ("a", "BIGINT"),
        ("b: c", "ARRAY<OBJECT<x: STRING, y: VOID>>"),
        ("d", "DECIMAL(6,2)"),
    ]
    assert fields_of("BIGINT") == fields_of("OBJECT<>") == []
