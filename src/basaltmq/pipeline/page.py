"""A page to look at in a browser: one file, tables and plots as SVG within it, nothing loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 860
HEIGHT: Final = 240
LEFT: Final = 70
BOTTOM: Final = 40
COLORS: Final = ("#3b6ea5", "#d08a2e", "#7a9a4a", "#a5483b")
LABELS_MAX: Final = 12
"""Labels below a plot; more would lie on one another."""

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 960px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; border-bottom: 2px solid #888; }
td, th { padding: .25em .8em .25em 0; vertical-align: top; } td { border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.loss { color: #a5483b; font-weight: 600; } .fault { color: #b06f10; } .note { color: #666; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #555; }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole page."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def table(rows: Sequence[Mapping[str, Any]], empty: str = "nothing") -> str:
    """Rows of the same columns; a column `severity` colours its row."""
    if not rows:
        return paragraph(empty)
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    lines = []
    for row in rows:
        kind = html.escape(str(row.get("severity", "")))
        lines.append(f'<tr class="{kind}">' + "".join(_cell(value) for value in row.values()) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """A plot of bars, side by side for each label."""
    if not labels:
        return ""
    top = max((value for values in series.values() for value in values), default=0) or 1
    slot = (WIDTH - LEFT - 10) / len(labels)
    width = max(1.0, slot * 0.8 / max(len(series), 1))
    parts = [_frame(title, top)]
    for index, (name, values) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        for at, value in enumerate(values):
            height = (HEIGHT - BOTTOM - 30) * value / top
            x, y = LEFT + at * slot + slot * 0.1 + index * width, HEIGHT - BOTTOM - height
            said = html.escape(f"{labels[at]}: {name} {_number(value)}")
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}">'
                f"<title>{said}</title></rect>"
            )
        parts.append(
            f'<text x="{WIDTH - 10 - 110 * (len(series) - index)}" y="14" style="fill:{color}">'
            f"&#9632; {html.escape(name)}</text>"
        )
    every = -(-len(labels) // LABELS_MAX)
    for at in range(0, len(labels), every):
        x = LEFT + at * slot + slot / 2
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="middle">{html.escape(labels[at])}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _frame(title: str, top: float) -> str:
    base = HEIGHT - BOTTOM
    return (
        f'<text x="{LEFT}" y="14" style="font-weight:600">{html.escape(title)}</text>'
        f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - 10}" y2="{base}" stroke="#888"/>'
        f'<text x="{LEFT - 6}" y="34" text-anchor="end">{_number(top)}</text>'
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">0</text>'
    )


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="number">{_number(value)}</td>'
    return f"<td>{'-' if value is None else html.escape(str(value))}</td>"


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
