"""A page to look at in a browser: one file, tables and plots as SVG within it, nothing loaded from anywhere.

Colours follow the reader's setting, light or dark; on paper it is light. Everything that comes from data is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 920
HEIGHT: Final = 260
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 44
BOTTOM: Final = 40
SERIES_MAX: Final = 6
"""Colours there are."""

LABELS_MAX: Final = 10
"""Labels below a plot; more would lie on one another."""

BARS_MAX: Final = 400
"""Bars of a plot; beyond, neighbours are put together."""

ROW: Final = 24
NAME_WIDTH: Final = 230
NAME_CHARACTERS: Final = 34
TILE_CHARACTERS: Final = 10
"""Of a figure in large type."""

SHORT_CHARACTERS: Final = 24
"""Of a cell that is not broken into lines."""

TABLE_ROWS_MAX: Final = 500
"""Rows of a table on a page; the JSON has them all."""

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #5b6670; --line: #d9dee3; --paper: #ffffff; --card: #f5f7f9;
  --c0: #2f6fb0; --c1: #d98324; --c2: #4f9a5b; --c3: #b8433a; --c4: #7b5ea7; --c5: #4a9aa8;
  --loss: #b3261e; --fault: #96600a; --good: #2c7a3f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa6b1; --line: #39424b; --paper: #14181c;
  --card: #1e242a; --c0: #6aa9e6; --c1: #eba552; --c2: #7fc38b; --c3: #e5776d; --c4: #ab91d3; --c5: #78c5d2;
  --loss: #ff8a80; --fault: #f0b95b; --good: #7fce93; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--paper); max-width: 1000px; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .25rem 0 1rem; color: var(--soft); } p.verdict { font-size: 1.1rem; }
p.loss { color: var(--loss); } p.fault { color: var(--fault); } p.good { color: var(--good); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border-radius: 8px; padding: .7rem 1rem; min-width: 8.5rem; flex: 1; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; margin-bottom: 1.25rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; font-weight: 600; color: var(--soft); border-bottom: 2px solid var(--line);
  white-space: nowrap; }
td, th { padding: .35rem .9rem .35rem 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); overflow-wrap: anywhere; min-width: 3.5rem; }
td.short { white-space: nowrap; }
.tile b.long { font-size: 1rem; line-height: 1.4; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.loss { color: var(--loss); font-weight: 600; } .fault { color: var(--fault); font-weight: 600; }
.good { color: var(--good); font-weight: 600; } .note { color: var(--soft); }
figure { margin: 0 0 1.5rem; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11.5px; fill: var(--soft); } svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .base { stroke: var(--soft); stroke-width: 1; }
svg .name { fill: var(--ink); }
code { font-size: .85rem; background: var(--card); padding: .1rem .3rem; border-radius: 4px; overflow-wrap: anywhere; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def page(title: str, sections: Sequence[str]) -> str:
    """A whole page."""
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def verdict(text: str, tone: str) -> str:
    """The sentence a reader came for; `tone` is good, fault or loss."""
    return f'<p class="verdict {html.escape(tone)}">{html.escape(text)}</p>'


def code(text: str) -> str:
    return f"<p><code>{html.escape(text)}</code></p>"


def tiles(figures: Sequence[tuple[str, object]]) -> str:
    """Figures that are seen at once: (what, how much)."""
    parts = []
    for what, value in figures:
        said = _text(value)
        long = ' class="long"' if len(said) > TILE_CHARACTERS else ""
        parts.append(f'<div class="tile"><b{long}>{html.escape(said)}</b><span>{html.escape(what)}</span></div>')
    return f'<div class="tiles">{"".join(parts)}</div>'


def table(rows: Sequence[Mapping[str, Any]], empty: str = "nothing") -> str:
    """Rows of the same columns; a column `severity` is coloured."""
    if not rows:
        return paragraph(empty)
    numeric = {name for name in rows[0] if all(_is_number(row.get(name)) for row in rows)}
    head = "".join(
        f"<th{_NUMBER if name in numeric else ''}>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0]
    )
    lines = []
    for row in rows[:TABLE_ROWS_MAX]:
        cells = "".join(_cell(value, name in numeric, name == "severity") for name, value in row.items())
        lines.append(f"<tr>{cells}</tr>")
    more = "" if len(rows) <= TABLE_ROWS_MAX else paragraph(f"and {len(rows) - TABLE_ROWS_MAX:,} more")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    return f'<div class="scroll">{body}</div>{more}'


def bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """A plot of upright bars over labels in order, as of time; side by side for each label."""
    if not labels:
        return ""
    labels, series = _fewer(labels, series)
    top, step = scale(max((value for values in series.values() for value in values), default=0))
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    slot = width / len(labels)
    gap = min(slot * 0.2, 12.0)
    thick = max(0.6, (slot - gap) / max(len(series), 1))
    parts = [_title(title, unit), *_grid(top, step, height)]
    for index, (name, values) in enumerate(series.items()):
        for at, value in enumerate(values):
            if not value:
                continue
            tall = max(height * value / top, 1.0)
            x, y = LEFT + at * slot + gap / 2 + index * thick, TOP + height - tall
            said = html.escape(f"{labels[at]}: {name} {number(value)}{_spaced(unit)}")
            parts.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{thick:.2f}" height="{tall:.2f}" '
                f'style="fill:var(--c{index % SERIES_MAX})"><title>{said}</title></rect>'
            )
    if len(series) > 1:
        parts.append(_legend(list(series)))
    every = -(-len(labels) // LABELS_MAX)
    for at in range(0, len(labels), every):
        x = LEFT + at * slot + slot / 2
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{_short(labels[at])}</text>')
    return f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg></figure>'


def lying_bars(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], unit: str = "") -> str:
    """A plot of bars that lie, one under the other, for things with names; each says its figure."""
    if not labels:
        return ""
    group = ROW * len(series) if len(series) > 1 else ROW
    height = TOP + len(labels) * (group + 6) + 8
    top = max((value for values in series.values() for value in values), default=0) or 1
    width = WIDTH - NAME_WIDTH - 110
    parts = [_title(title, "", left=0)]
    if len(series) > 1:
        parts.append(_legend(list(series)))
    thick = group / len(series) - 6 if len(series) > 1 else ROW - 6
    for at, label in enumerate(labels):
        y = TOP + at * (group + 6)
        parts.append(
            f'<text class="name" x="{NAME_WIDTH - 10}" y="{y + group / 2 + 2:.1f}" text-anchor="end">'
            f"{_short(label, NAME_CHARACTERS)}<title>{html.escape(label)}</title></text>"
        )
        for index, (name, values) in enumerate(series.items()):
            wide = max(width * values[at] / top, 1.0)
            up = y + index * (thick + 4) + (group - len(series) * (thick + 4)) / 2
            said = html.escape(f"{label}: {name} {number(values[at])}{_spaced(unit)}")
            parts.append(
                f'<rect x="{NAME_WIDTH}" y="{up:.1f}" width="{wide:.1f}" height="{thick:.1f}" rx="2" '
                f'style="fill:var(--c{index % SERIES_MAX})"><title>{said}</title></rect>'
                f'<text x="{NAME_WIDTH + wide + 6:.1f}" y="{up + thick / 2 + 4:.1f}">'
                f"{number(values[at])}{html.escape(_spaced(unit))}</text>"
            )
    return f'<figure><svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg></figure>'


def scale(largest: float, lines: int = 4) -> tuple[float, float]:
    """(top of an axis, distance of its lines): round numbers, the top at or above the largest."""
    if largest <= 0:
        return 1.0, 1.0
    raw = largest / lines
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * (1 - 1e-9))
    return step * math.ceil(largest / step - 1e-9), step


def number(value: float) -> str:
    """As people read it: 12,345 or 3.4 M."""
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if size >= limit:
            return f"{value / limit:.3g} {letter}"
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:,.1f}" if size >= 10 else f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes as people read them."""
    if value is None:
        return "-"
    for limit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= limit:
            return f"{value / limit:.1f} {name}"
    return f"{value:.0f} B"


_NUMBER: Final = ' class="number"'


def _title(title: str, unit: str, left: int = LEFT) -> str:
    said = f"{title}, {unit}" if unit else title
    return f'<text class="title" x="{left}" y="16">{html.escape(said)}</text>'


def _grid(top: float, step: float, height: int) -> list[str]:
    parts = []
    for line in range(round(top / step) + 1):
        value = line * step
        y = TOP + height - height * value / top
        kind = "base" if line == 0 else "grid"
        parts.append(f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
    return parts


def _legend(names: Sequence[str]) -> str:
    parts = []
    x = WIDTH - RIGHT - sum(22 + 7 * len(name) for name in names)
    for index, name in enumerate(names):
        parts.append(
            f'<rect x="{x}" y="7" width="10" height="10" rx="2" style="fill:var(--c{index % SERIES_MAX})"/>'
            f'<text x="{x + 14}" y="16">{html.escape(name)}</text>'
        )
        x += 22 + 7 * len(name)
    return "".join(parts)


def _fewer(
    labels: Sequence[str], series: Mapping[str, Sequence[float]]
) -> tuple[Sequence[str], Mapping[str, Sequence[float]]]:
    """Neighbours summed up, so that bars can be told apart."""
    by = -(-len(labels) * len(series) // BARS_MAX)
    if by <= 1:
        return labels, series
    begins = range(0, len(labels), by)
    summed = {name: [sum(values[at : at + by]) for at in begins] for name, values in series.items()}
    return [labels[at] for at in begins], summed


def _short(text: str, most: int = 16) -> str:
    return html.escape(text if len(text) <= most else text[: most - 1] + "…")


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def _cell(value: object, is_number: bool, is_severity: bool) -> str:
    if is_number:
        said = f"{value:,}" if isinstance(value, int) else _text(value)
        return f'<td class="number">{html.escape(said)}</td>'
    said = html.escape(_text(value))
    kind = said if is_severity else "short" if len(said) <= SHORT_CHARACTERS else ""
    return f'<td class="{kind}">{said}</td>'
