"""One chart of all jobs: a panel per job with its own scale, a bar per broker, a line from quartile to quartile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, Final

from bench.machine import machine
from bench.side_by_side.comparison import BASALT, Figures, quartiles
from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE: Final = Path(__file__).parent
CHART: Final = HERE.parents[1] / "docs" / "img" / "peers.svg"
NOTE: Final = "Confirm after fsync: Basalt and those marked fsync. Bars: medians. Lines: first to third quartile."

COLUMNS: Final = 2
PANEL_WIDTH: Final = 440
NAME_WIDTH: Final = 110
FIGURE_WIDTH: Final = 80
BAR_STEP: Final = 22
TOP: Final = 100
PANEL_GAP: Final = 44
OURS, THEIRS = "#c2410c", "#94a3b8"


def draw(figures: Figures, path: Path = CHART) -> None:
    path.write_text(chart(figures, f"{date.today().isoformat()}, {machine()}"))


def chart(figures: Figures, where: str) -> str:
    """The chart as SVG; `where` names the date and the machine."""
    panels, top = [], TOP
    jobs = list(figures.items())
    for at in range(0, len(jobs), COLUMNS):
        row = jobs[at : at + COLUMNS]
        for column, (job, rates) in enumerate(row):
            panels.append(_panel(job, rates, 16 + column * PANEL_WIDTH, top))
        top += BAR_STEP * max(len(rates) for _, rates in row) + PANEL_GAP
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    title = "Messages per second, more is better"
    size = {"width": COLUMNS * PANEL_WIDTH + 16, "height": top - PANEL_GAP + 28}
    return environment.get_template("chart.svg.j2").render(title=title, notes=[where, NOTE], panels=panels, **size)


def _panel(job: str, rates: Mapping[str, Sequence[float]], x: int, y: int) -> dict[str, Any]:
    spreads = {name: quartiles(each) for name, each in rates.items()}
    left = x + NAME_WIDTH
    scale = (PANEL_WIDTH - NAME_WIDTH - FIGURE_WIDTH) / max(high for _, _, high in spreads.values())
    bars = [
        {
            "name": name,
            "x": left,
            "y": y + 10 + at * BAR_STEP,
            "width": round(middle * scale, 1),
            "low": round(left + low * scale, 1),
            "high": round(left + high * scale, 1),
            "label": round(left + high * scale + 6, 1),
            "figure": f"{middle:,.0f}",
            "fill": OURS if name == BASALT else THEIRS,
        }
        for at, (name, (low, middle, high)) in enumerate(spreads.items())
    ]
    return {"title": job, "x": x, "y": y, "bars": bars}
