"""`make demo`: publish, consume, archive, compact, audit, replay and report, end to end; ends by naming what to open.

Everything is created below one folder (default ./demo-pipeline), which is removed first if an earlier demo created it.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import orders

import basaltmq
from basaltmq.errors import BasaltError
from basaltmq.pipeline.archive.archive import ArchiveJob, archive
from basaltmq.pipeline.archive.compact import CompactJob, compact
from basaltmq.pipeline.archive.replay import ReplayJob, replay
from basaltmq.pipeline.audit.audit import AuditJob, audit
from basaltmq.pipeline.findings import exit_code
from basaltmq.pipeline.lag import lag
from basaltmq.pipeline.latency import latency
from basaltmq.pipeline.reports.pages import audit_page, lag_page, latency_page
from basaltmq.pipeline.session import check_environment, quiet_session

MARK = ".basalt-demo"


def say(text: str, began_s: float) -> None:
    print(f"{time.monotonic() - began_s:6.1f} s  {text}", flush=True)


def run(root: Path) -> int:
    """Run all steps. Return the exit code of the audit."""
    if root.exists():
        if not (root / MARK).exists():
            print(f"{root} is there and not of this demo; name another folder", file=sys.stderr)
            return 1
        shutil.rmtree(root)
    check_environment()
    root.mkdir(parents=True)
    (root / MARK).touch()
    data, target = root / "data", root / "archive"
    began_s = time.monotonic()

    orders.publish(data)
    say("20,000 orders published to the topic `orders`, in 4 partitions", began_s)
    say(f"{orders.consume(data):,} of them read by the group `billing`", began_s)
    orders.work(data)
    say("2,000 jobs of 3 tenants worked on, their events told to `__events`", began_s)
    behind = lag(str(data))
    for each in behind.groups:
        say(f"  {each.group} is {each.lag:,} behind on {each.topic}[{each.partition}]", began_s)
    (root / "lag.html").write_text(lag_page(behind))

    spark = quiet_session("basalt-demo", conf={"spark.sql.shuffle.partitions": "4", "spark.driver.memory": "1g"})
    try:
        source = {"path": str(data), "subscribe": "orders"}
        done = archive(spark, ArchiveJob(source=source, target=str(target), offsets_max=10_000))
        say(f"{done.records:,} records archived in {done.batches} batches and {done.files} files", began_s)
        packed = compact(spark, CompactJob(archive=str(target)))
        say(f"compacted: {packed.files_before} files became {packed.files_after}", began_s)
        with basaltmq.open(data) as db:
            db.topic("large-orders", partitions=2)
        job = ReplayJob(
            topics=["orders"],
            archive=str(target),
            target={"path": str(data)},
            target_topic="large-orders",
            checkpoint=str(root / "replay"),
            where="CAST(get_json_object(CAST(value AS STRING), '$.total') AS DOUBLE) > 50",
        )
        say(f"{replay(spark, job).records:,} orders above 50 replayed to `large-orders`", began_s)
        audited = audit(spark, AuditJob(path=str(data), archive=str(target)))
        (root / "audit.html").write_text(audit_page(audited))
        code = exit_code(audited.findings)
        say(f"audited: {'all is well' if code == 0 else 'see the page'}", began_s)
        (root / "latency.html").write_text(latency_page(latency(spark, str(data))))
        say("latency measured", began_s)
    finally:
        spark.stop()
    print("\nOpen:")
    print(f"  {root / 'audit.html'}      does everything fit together?")
    print(f"  {root / 'latency.html'}    how long did jobs take?")
    print(f"  {root / 'lag.html'}        who is how far behind?")
    print(f"  {target}           the archive: Parquet by topic and day, manifests beside it")
    return code


if __name__ == "__main__":
    try:
        sys.exit(run(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-pipeline")))
    except BasaltError as error:
        sys.exit(f"error [{error.code}]: {error}")
