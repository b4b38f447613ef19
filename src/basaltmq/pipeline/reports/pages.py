"""Reports of the pipeline's jobs as HTML pages, and the rows of their tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from basaltmq.pipeline.findings import Severity, exit_code
from basaltmq.pipeline.reports.figures import number
from basaltmq.pipeline.reports.rendering import render

if TYPE_CHECKING:
    # These modules import PySpark, which `basalt pipeline lag` does not need.
    from basaltmq.pipeline.audit.audit import Audited
    from basaltmq.pipeline.dlq import DlqReport
    from basaltmq.pipeline.lag import Lag
    from basaltmq.pipeline.latency import Latencies, QueueLatency
    from basaltmq.pipeline.profile import Profile, TopicProfile

TOPIC_PLOTS_MAX: Final = 50
LAGS_MAX: Final = 40
CAUSES_MAX: Final = 15
"""Largest items that a page plots."""

VERDICTS: Final = {
    0: ("good", "No inconsistency found."),
    2: ("fault", "Some data is inconsistent."),
    3: ("loss", "Records are missing or damaged."),
}
WORST_FIRST: Final = (Severity.LOSS, Severity.FAULT, Severity.NOTE)

Row = dict[str, Any]


def audit_page(result: Audited) -> str:
    tone, verdict = VERDICTS[exit_code(result.findings)]
    records = Counter[str]()
    for bucket in result.buckets:
        records[bucket.topic] += max(bucket.in_log, bucket.in_archive)
    return render(
        "audit.html.j2",
        title="Basalt audit",
        result=result,
        tone=tone,
        verdict=verdict,
        findings=sorted(result.findings, key=lambda each: (WORST_FIRST.index(each.severity), each.kind, each.subject)),
        topics=len(records),
        plotted=[topic for topic, _ in records.most_common(TOPIC_PLOTS_MAX)],
    )


def latency_page(result: Latencies) -> str:
    longest_ms = max((each.total.p99_ms or 0.0 for each in result.queues), default=0.0)
    return render(
        "latency.html.j2",
        title="Basalt latency",
        result=result,
        longest=f"{number(round(longest_ms))} ms",
        queues=[latency_row(each) for each in result.queues],
        keys=[latency_row(each) for each in result.keys],
        skew=[{"queue": queue, "slowest_to_median": value} for queue, value in sorted(result.skew.items())],
    )


def latency_row(each: QueueLatency) -> Row:
    row: Row = {"queue": each.queue}
    if each.fairness_key is not None:
        row["fairness_key"] = each.fairness_key
    for name in ("enqueued", "acked", "failed", "dead_lettered", "dropped", "redelivered"):
        row[name] = getattr(each, name)
    for name in ("wait", "work", "total"):
        times = msgspec.to_builtins(getattr(each, name))
        row |= {f"{name}_{percentile}": value for percentile, value in times.items()}
    return row


def lag_page(result: Lag) -> str:
    most = sorted(result.groups, key=lambda each: -each.lag)[:LAGS_MAX]
    lags = {f"{each.group} · {each.topic}[{each.partition}]": each.lag for each in most}
    return render("lag.html.j2", title="Basalt lag", result=result, lags=lags, queues_max=LAGS_MAX)


def dlq_page(result: DlqReport) -> str:
    plots = []
    for queue in sorted({each.queue for each in result.hours}):
        own = [each for each in result.hours if each.queue == queue]
        hours = sorted({each.hour for each in own})
        counts = {(each.hour, each.reason): each.messages for each in own}
        reasons = sorted({each.reason for each in own})
        series = {reason: [counts.get((hour, reason), 0) for hour in hours] for reason in reasons}
        plots.append((queue, [hour[5:] for hour in hours], series))
    most = sorted(result.causes, key=lambda each: -each.messages)[:CAUSES_MAX]
    causes = [" · ".join(filter(None, (each.origin, each.reason, each.error))) for each in most]
    return render(
        "dlq.html.j2",
        title="Basalt dead letters",
        result=result,
        causes=causes,
        cause_counts=[each.messages for each in most],
        plots=plots,
    )


def profile_page(result: Profile) -> str:
    fields: dict[str, list[Row]] = {}
    for each in result.fields:
        row = msgspec.to_builtins(each) | {"null_rate": f"{each.null_rate:.1%}"}
        fields.setdefault(row.pop("topic"), []).append(row)
    return render(
        "profile.html.j2",
        title="Basalt profile",
        result=result,
        topics=[topic_row(each) for each in result.topics],
        fields=fields,
    )


def topic_row(each: TopicProfile) -> Row:
    return {
        "topic": each.topic,
        "records": each.records,
        "partitions": each.partitions,
        "first": each.first,
        "last": each.last,
        "keys": each.keys_distinct,
        "without_key": each.keys_null,
        "without_value": each.values_null,
        "value_p50": each.value_bytes.p50,
        "value_p99": each.value_bytes.p99,
        "value_max": each.value_bytes.largest,
        "bytes": each.key_bytes.total + each.value_bytes.total,
        "json": None if each.parse_rate is None else f"{each.parse_rate:.1%}",
    }
