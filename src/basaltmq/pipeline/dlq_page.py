"""Dead letters as a page."""

from __future__ import annotations

import msgspec

from basaltmq.pipeline.dlq import DlqReport
from basaltmq.pipeline.page import bars, heading, lying_bars, page, paragraph, size, table, tiles, verdict

CAUSES_SHOWN = 15
"""Bars of one plot: the most."""


def dlq_page(report: DlqReport) -> str:
    """What died of what."""
    dead = sum(each.messages for each in report.queues)
    again = sum(each.redriven_before for each in report.queues)
    said = f"{dead:,} messages are dead." if dead else "Nothing is dead."
    sections = [
        verdict(said, "fault" if dead else "good"),
        tiles(
            [
                ("dead letters", dead),
                ("of them redriven before", again),
                ("size", size(sum(each.size_bytes for each in report.queues))),
                ("queues", len(report.queues)),
                ("oldest", min((each.oldest for each in report.queues if each.oldest), default="-")),
                ("newest", max((each.newest for each in report.queues if each.newest), default="-")),
            ]
        ),
        paragraph(f"Times are UTC. Looked at in {report.seconds:.1f} s."),
        heading("Queues of dead letters"),
        table([msgspec.to_builtins(each) for each in report.queues], "there are none"),
        heading("What they died of"),
    ]
    most = sorted(report.causes, key=lambda each: -each.messages)[:CAUSES_SHOWN]
    names = [" · ".join(filter(None, (each.origin, each.reason, each.error))) for each in most]
    sections.append(lying_bars("Causes", names, {"messages": [float(each.messages) for each in most]}, "messages"))
    sections.append(table([msgspec.to_builtins(each) for each in report.causes], "nothing"))
    sections.append(heading("When they died"))
    for queue in sorted({each.queue for each in report.hours}):
        own = [each for each in report.hours if each.queue == queue]
        hours = sorted({each.hour for each in own})
        counts = {(each.hour, each.reason): float(each.messages) for each in own}
        reasons = sorted({each.reason for each in own})
        series = {reason: [counts.get((hour, reason), 0.0) for hour in hours] for reason in reasons}
        sections.append(bars(queue, [hour[5:] for hour in hours], series, "messages an hour"))
    keys = [each for each in report.keys if each.fairness_key]
    if keys:
        sections += [heading("Fairness keys"), table([msgspec.to_builtins(each) for each in keys])]
    return page("Basalt dead letters", sections)
