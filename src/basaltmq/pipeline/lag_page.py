"""Backlogs of groups and queues as a page."""

from __future__ import annotations

import msgspec

from basaltmq.pipeline.lag import GroupLag, Lag
from basaltmq.pipeline.page import heading, lying_bars, page, size, table, tiles

SHOWN_MAX = 40
"""Bars of one plot: the longest."""


def lag_page(result: Lag) -> str:
    """How far everybody is behind."""
    groups = {each.group for each in result.groups}
    sections = [
        tiles(
            [
                ("groups", len(groups)),
                ("records behind, all groups", sum(each.lag for each in result.groups)),
                ("queues", len(result.queues)),
                ("messages in queues", sum(each.messages for each in result.queues)),
                ("bytes in queues", size(sum(each.size_bytes for each in result.queues))),
            ]
        ),
        heading("Consumer groups"),
    ]
    behind = sorted(result.groups, key=lambda each: -each.lag)[:SHOWN_MAX]
    sections.append(
        lying_bars("Behind", [_name(each) for each in behind], {"lag": [float(each.lag) for each in behind]}, "records")
    )
    sections.append(table([msgspec.to_builtins(each) for each in result.groups], "no group has committed anything"))
    full = sorted(result.queues, key=lambda each: -each.messages)[:SHOWN_MAX]
    series = {
        "ready or leased": [float(each.messages - each.delayed) for each in full],
        "delayed": [float(each.delayed) for each in full],
    }
    sections += [
        heading("Queues"),
        lying_bars("Backlog", [each.queue for each in full], series, "messages"),
        table([msgspec.to_builtins(each) for each in result.queues], "there are no queues"),
    ]
    return page("Basalt lag", sections)


def _name(each: GroupLag) -> str:
    return f"{each.group} · {each.topic}[{each.partition}]"
