"""Rates of counters, from one look to the next.

Nothing is measured while nobody looks. Whoever asks gets the rate since the last look that is at least `WINDOW_S` old,
so a monitor that asks every half minute sees the mean of that half minute; the first look at anything is 0.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

WINDOW_S: Final = 5.0
"""Shorter, and one message more or less would be seen in the rate."""

LOOKS_MAX: Final = 10_000
"""Things whose last look is remembered; about 5 MB."""


class Rates:
    """The last looks at things that count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looks: OrderedDict[Hashable, tuple[object, float, dict[str, int], dict[str, float]]] = OrderedDict()

    def of(self, key: Hashable, thing: object, counts: Mapping[str, int]) -> dict[str, float]:
        """Per second, by the names of the counts. Another `thing` under the key begins again."""
        now = self._clock()
        known = self._looks.get(key)
        if known is None or known[0] is not thing:
            rates = dict.fromkeys(counts, 0.0)
        elif now - known[1] < WINDOW_S:
            self._looks.move_to_end(key)
            return known[3]
        else:
            spent_s = now - known[1]
            rates = {name: max(0, count - known[2].get(name, 0)) / spent_s for name, count in counts.items()}
        self._looks[key] = (thing, now, dict(counts), rates)
        self._looks.move_to_end(key)
        if len(self._looks) > LOOKS_MAX:
            self._looks.popitem(last=False)
        return rates

    def stats(self, key: Hashable, thing: object, counts: Mapping[str, int]) -> dict[str, Any]:
        """Counts and rates in RabbitMQ's form: {"publish": 3, "publish_details": {"rate": 0.1}, ...}."""
        shown: dict[str, Any] = dict(counts)
        for name, rate in self.of(key, thing, counts).items():
            shown[f"{name}_details"] = {"rate": round(rate, 3)}
        return shown
