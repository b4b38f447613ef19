"""Results of audits and of latency as pages for people."""

from __future__ import annotations

from collections import Counter

import msgspec

from basaltmq.pipeline.audit.audit import Audited
from basaltmq.pipeline.findings import Severity, exit_code
from basaltmq.pipeline.latency import Latencies, QueueLatency
from basaltmq.pipeline.page import bars, heading, lying_bars, number, page, paragraph, table, tiles, verdict

PLOTS_MAX = 50
"""Topics with a plot on a page: the largest."""

VERDICTS = {0: "Everything fits together.", 2: "Some things do not fit.", 3: "Records are missing or damaged."}
TONES = {0: "good", 2: "fault", 3: "loss"}
ORDER = (Severity.LOSS, Severity.FAULT, Severity.NOTE)
"""The worst first."""


def audit_page(result: Audited) -> str:
    """What an audit found."""
    where = result.path if result.archive is None else f"{result.path} against the archive {result.archive}"
    code = exit_code(result.findings)
    counted = {kind: sum(each.severity is kind for each in result.findings) for kind in ORDER}
    figures: list[tuple[str, object]] = [
        ("records read from the log", sum(each.read for each in result.partitions)),
        ("records in the index", sum(each.indexed for each in result.partitions)),
    ]
    if result.archive is not None:
        figures.append(("records in the archive", sum(each.archived or 0 for each in result.partitions)))
    figures += [
        ("losses", counted[Severity.LOSS]),
        ("faults", counted[Severity.FAULT]),
        ("notes", counted[Severity.NOTE]),
    ]
    findings = sorted(result.findings, key=lambda each: (ORDER.index(each.severity), each.kind, each.subject))
    sections = [
        paragraph(f"{where}, looked at in {result.seconds:.1f} s"),
        verdict(VERDICTS[code], TONES[code]),
        tiles(figures),
        heading("Findings"),
        table([msgspec.to_builtins(each) for each in findings], "none"),
        heading("Records by hour of their own time, UTC"),
    ]
    counts = Counter[str]()
    for bucket in result.buckets:
        counts[bucket.topic] += max(bucket.in_log, bucket.in_archive)
    if not counts:
        sections.append(paragraph("no records"))
    elif len(counts) > PLOTS_MAX:
        sections.append(paragraph(f"of the {PLOTS_MAX} largest of {len(counts)} topics"))
    for topic in sorted(topic for topic, _ in counts.most_common(PLOTS_MAX)):
        own = [bucket for bucket in result.buckets if bucket.topic == topic]
        series = {"log": [float(bucket.in_log) for bucket in own]}
        if result.archive is not None:
            series["archive"] = [float(bucket.in_archive) for bucket in own]
        sections.append(bars(topic, [bucket.hour[5:] for bucket in own], series, "records an hour"))
    sections += [heading("Partitions"), table([msgspec.to_builtins(each) for each in result.partitions], "no topics")]
    return page("Basalt audit", sections)


def latency_page(result: Latencies) -> str:
    """How long messages took."""
    worst = max((each.total.p99_ms or 0.0 for each in result.queues), default=0.0)
    sections = [
        paragraph("Waiting is from enqueued to leased, work from leased to acked, total from enqueued to acked."),
        tiles(
            [
                ("enqueued", sum(each.enqueued for each in result.queues)),
                ("acked", sum(each.acked for each in result.queues)),
                ("failed", sum(each.failed for each in result.queues)),
                ("redelivered", sum(each.redelivered for each in result.queues)),
                ("dead-lettered", sum(each.dead_lettered for each in result.queues)),
                ("longest p99 in all", f"{number(round(worst))} ms"),
            ]
        ),
        heading("Queues"),
    ]
    names = [each.queue for each in result.queues]
    for what, said in (("wait", "Waiting"), ("work", "Work"), ("total", "Total")):
        times = [getattr(each, what) for each in result.queues]
        series = {p: [getattr(each, f"{p}_ms") or 0.0 for each in times] for p in ("p50", "p95", "p99")}
        sections.append(lying_bars(said, names, series, "ms"))
    sections.append(table([flat(each) for each in result.queues], "no events"))
    sections.append(heading("Messages a minute, UTC"))
    for queue in names:
        own = [each for each in result.minutes if each.queue == queue]
        series = {
            "enqueued": [float(each.enqueued) for each in own],
            "acked": [float(each.acked) for each in own],
            "failed": [float(each.failed) for each in own],
        }
        sections.append(bars(queue, [each.minute[5:] for each in own], series, "messages a minute"))
    sections += [heading("Fairness keys that wait longest"), table([flat(each) for each in result.keys], "none")]
    if result.skew:
        skew = [{"queue": queue, "slowest_over_middle": value} for queue, value in sorted(result.skew.items())]
        sections += [
            heading("Skew"),
            paragraph("The wait (p95) of the slowest fairness key over that of the middle one; 1 is even."),
            table(skew),
        ]
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
