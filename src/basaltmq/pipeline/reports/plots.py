"""Bar charts as shapes, which `templates/plot.svg.j2` draws. All coordinates are in pixels of the SVG view box."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from basaltmq.pipeline.reports.figures import number

WIDTH: Final = 920
HEIGHT: Final = 260
LINES: Final = 4
LEFT: Final = 64
RIGHT: Final = 12
TOP: Final = 44
BOTTOM: Final = 40
TITLE_Y: Final = 16

COLORS: Final = 6
"""The style sheet defines the colors --c0 to --c5."""

LABELS_MAX: Final = 10
"""Labels below a chart. More would overlap."""

BARS_MAX: Final = 400
"""Bars of a chart. Above this, neighbours are summed."""

LABEL_CHARACTERS: Final = 16
ROW: Final = 24
GAP: Final = 6
NAME_WIDTH: Final = 230
NAME_CHARACTERS: Final = 34
FIGURE_WIDTH: Final = 110
"""Space for the figure behind a horizontal bar."""

Series = Mapping[str, Sequence[float]]


class Bar(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    color: int
    radius: int = 0
    tooltip: str = ""


class Line(NamedTuple):
    kind: str
    left: float
    right: float
    y: float


class Text(NamedTuple):
    x: float
    y: float
    text: str
    anchor: str = "start"
    kind: str = ""
    tooltip: str = ""


class Plot(NamedTuple):
    width: int
    height: int
    bars: list[Bar]
    lines: list[Line]
    texts: list[Text]


def bars(title: str, labels: Sequence[str], series: Series, unit: str) -> Plot | None:
    """Return a chart of vertical bars over ordered labels, such as hours. None without labels."""
    if not labels:
        return None
    labels, series = _merge_neighbours(labels, series)
    top, step = scale(max((value for values in series.values() for value in values), default=0))
    height = HEIGHT - TOP - BOTTOM
    slot = (WIDTH - LEFT - RIGHT) / len(labels)
    gap = min(slot * 0.2, 12.0)
    thickness = max(0.6, (slot - gap) / max(len(series), 1))
    plot = Plot(WIDTH, HEIGHT, [], [], [Text(LEFT, TITLE_Y, f"{title}, {unit}", kind="title")])
    for line in range(round(top / step) + 1):
        y = TOP + height - height * line * step / top
        plot.lines.append(Line("grid" if line else "base", LEFT, WIDTH - RIGHT, y))
        plot.texts.append(Text(LEFT - 8, y + 4, number(line * step), "end"))
    for index, (name, values) in enumerate(series.items()):
        for at, value in enumerate(values):
            if value:
                tall = max(height * value / top, 1.0)
                x = LEFT + at * slot + gap / 2 + index * thickness
                tooltip = f"{labels[at]}: {name} {number(value)} {unit}"
                plot.bars.append(Bar(x, TOP + height - tall, thickness, tall, index % COLORS, tooltip=tooltip))
    _add_legend(plot, series)
    for at in range(0, len(labels), -(-len(labels) // LABELS_MAX)):
        x = LEFT + at * slot + slot / 2
        plot.texts.append(Text(x, HEIGHT - BOTTOM + 18, _shorten(labels[at], LABEL_CHARACTERS), "middle"))
    return plot


def horizontal_bars(title: str, labels: Sequence[str], series: Series, unit: str) -> Plot | None:
    """Return a chart of horizontal bars with names and figures. None without labels."""
    if not labels:
        return None
    group = ROW * len(series)
    thickness = ROW - GAP
    top = max((value for values in series.values() for value in values), default=0) or 1
    height = TOP + len(labels) * (group + GAP) + 8
    plot = Plot(WIDTH, height, [], [], [Text(0, TITLE_Y, title, kind="title")])
    _add_legend(plot, series)
    for at, label in enumerate(labels):
        y = TOP + at * (group + GAP)
        shown = _shorten(label, NAME_CHARACTERS)
        plot.texts.append(Text(NAME_WIDTH - 10, y + group / 2 + 2, shown, "end", "name", label))
        for index, (name, values) in enumerate(series.items()):
            wide = max((WIDTH - NAME_WIDTH - FIGURE_WIDTH) * values[at] / top, 1.0)
            upper = y + index * (thickness + 4) + len(series)
            figure = f"{number(values[at])} {unit}"
            plot.bars.append(
                Bar(NAME_WIDTH, upper, wide, thickness, index % COLORS, 2, tooltip=f"{label}: {name} {figure}")
            )
            plot.texts.append(Text(NAME_WIDTH + wide + 6, upper + thickness / 2 + 4, figure))
    return plot


def scale(largest: float) -> tuple[float, float]:
    """Return (top of the axis, distance of its lines): round numbers, the top at or above the largest value."""
    if largest <= 0:
        return 1.0, 1.0
    raw = largest / LINES
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw * (1 - 1e-9))
    return step * math.ceil(largest / step - 1e-9), step


def _add_legend(plot: Plot, series: Series) -> None:
    if len(series) < 2:
        return
    x = WIDTH - RIGHT - sum(22 + 7 * len(name) for name in series)
    for index, name in enumerate(series):
        plot.bars.append(Bar(x, 7, 10, 10, index % COLORS, 2))
        plot.texts.append(Text(x + 14, TITLE_Y, name))
        x += 22 + 7 * len(name)


def _merge_neighbours(labels: Sequence[str], series: Series) -> tuple[Sequence[str], Series]:
    """Sum neighbours until the number of bars is within the limit."""
    by = -(-len(labels) * len(series) // BARS_MAX)
    if by <= 1:
        return labels, series
    begins = range(0, len(labels), by)
    summed = {name: [sum(values[at : at + by]) for at in begins] for name, values in series.items()}
    return [labels[at] for at in begins], summed


def _shorten(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"
