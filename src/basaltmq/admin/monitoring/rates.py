"""Rates of counters, computed between queries.

Nothing is measured while nobody queries. A query returns the rate since the last sample that is at least `WINDOW_S`
old. A monitor with an interval of 30 s thus sees the mean over 30 s. The first query of a counter returns 0.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

WINDOW_S: Final = 5.0
"""Shorter windows would show single messages in the rate."""

SAMPLES_MAX: Final = 10_000
"""Objects whose last sample is kept, about 5 MB."""


class Rates:
    """The last samples of counted objects."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: OrderedDict[Hashable, tuple[object, float, dict[str, int], dict[str, float]]] = OrderedDict()

    def of(self, key: Hashable, thing: object, counts: Mapping[str, int]) -> dict[str, float]:
        """Return rates per second by the names of the counts. A different `thing` under the key resets them."""
        now = self._clock()
        known = self._samples.get(key)
        if known is None or known[0] is not thing:
            rates = dict.fromkeys(counts, 0.0)
        elif now - known[1] < WINDOW_S:
            self._samples.move_to_end(key)
            return known[3]
        else:
            spent_s = now - known[1]
            rates = {name: max(0, count - known[2].get(name, 0)) / spent_s for name, count in counts.items()}
        self._samples[key] = (thing, now, dict(counts), rates)
        self._samples.move_to_end(key)
        if len(self._samples) > SAMPLES_MAX:
            self._samples.popitem(last=False)
        return rates

    def stats(self, key: Hashable, thing: object, counts: Mapping[str, int]) -> dict[str, Any]:
        """Return counts and rates in RabbitMQ's form: {"publish": 3, "publish_details": {"rate": 0.1}, ...}."""
        shown: dict[str, Any] = dict(counts)
        for name, rate in self.of(key, thing, counts).items():
            shown[f"{name}_details"] = {"rate": round(rate, 3)}
        return shown
