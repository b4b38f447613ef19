"""The Prometheus text format. It is simple enough not to need a library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Metric(NamedTuple):
    """A metric with all its samples."""

    name: str
    kind: Literal["counter", "gauge"]
    meaning: str
    samples: Iterable[tuple[Mapping[str, str], float]]


def expose(metrics: Iterable[Metric]) -> bytes:
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {metric.meaning.translate(_ESCAPES)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for labels, value in metric.samples:
            inner = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
            lines.append(f"{metric.name}{'{' + inner + '}' if inner else ''} {_number(value)}")
    lines.append("")
    return "\n".join(lines).encode()


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return repr(value) if value == value and abs(value) != float("inf") else "NaN"
