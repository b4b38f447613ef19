"""Results of jobs as pages for people."""

from __future__ import annotations

import msgspec

from basaltmq.pipeline.audit import Audited
from basaltmq.pipeline.findings import exit_code
from basaltmq.pipeline.latency import Latencies, QueueLatency
from basaltmq.pipeline.page import bars, heading, page, paragraph, table

VERDICTS = {0: "Everything fits together.", 2: "Some things do not fit.", 3: "Records are missing or damaged."}


def audit_page(result: Audited) -> str:
    """What an audit found."""
    where = result.path if result.archive is None else f"{result.path} against {result.archive}"
    sections = [
        paragraph(f"{where}. {VERDICTS[exit_code(result.findings)]} Looked at in {result.seconds:.1f} s."),
        heading("Findings"),
        table([msgspec.to_builtins(each) for each in result.findings], "none"),
        heading("Records by hour"),
    ]
    for topic in sorted({bucket.topic for bucket in result.buckets}):
        own = [bucket for bucket in result.buckets if bucket.topic == topic]
        series = {"log": [float(bucket.in_log) for bucket in own]}
        if result.archive is not None:
            series["archive"] = [float(bucket.in_archive) for bucket in own]
        sections.append(bars(topic, [bucket.hour for bucket in own], series))
    sections += [heading("Partitions"), table([msgspec.to_builtins(each) for each in result.partitions], "no topics")]
    return page("Basalt audit", sections)


def latency_page(result: Latencies) -> str:
    """How long messages took."""
    sections = [heading("Queues"), table([flat(each) for each in result.queues], "no events")]
    names = [each.queue for each in result.queues]
    for what in ("wait", "work", "total"):
        times = [getattr(each, what) for each in result.queues]
        series = {p: [getattr(each, f"{p}_ms") or 0.0 for each in times] for p in ("p50", "p95", "p99")}
        sections.append(bars(f"{what}, ms", names, series))
    for queue in names:
        own = [each for each in result.minutes if each.queue == queue]
        series = {
            "enqueued": [float(each.enqueued) for each in own],
            "acked": [float(each.acked) for each in own],
            "failed": [float(each.failed) for each in own],
        }
        sections.append(bars(f"{queue}, messages a minute", [each.minute for each in own], series))
    sections += [heading("Fairness keys that wait longest"), table([flat(each) for each in result.keys], "none")]
    if result.skew:
        skew = [{"queue": queue, "slowest_over_middle": value} for queue, value in sorted(result.skew.items())]
        sections += [heading("Skew"), table(skew)]
    return page("Basalt latency", sections)


def flat(each: QueueLatency) -> dict[str, object]:
    """A row of a table."""
    row: dict[str, object] = {"queue": each.queue}
    if each.fairness_key is not None:
        row["fairness_key"] = each.fairness_key
    for name in ("enqueued", "acked", "failed", "dead_lettered", "dropped", "redelivered"):
        row[name] = getattr(each, name)
    for name in ("wait", "work", "total"):
        times = getattr(each, name)
        row[f"{name}_p50_ms"] = times.p50_ms
        row[f"{name}_p95_ms"] = times.p95_ms
        row[f"{name}_p99_ms"] = times.p99_ms
    return row
