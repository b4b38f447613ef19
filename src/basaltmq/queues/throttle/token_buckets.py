"""How fast messages may go: token buckets by throttle key (SPEC C11).

A limit is a rate (tokens per second) and a burst (tokens saved up at most). A message names throttle keys; it may go
when each of them that has a limit has a token, and takes one from each: all together or none. What waits, and who is
woken when, is the gate's (`throttle_gate`); where limits come from is the runtime configuration's (`throttle.<key>`).

A bucket is one number, the moment at which it will be full again:

    missing tokens = (full at - now) / interval      taking a token:  full at = max(full at, now) + interval
    n tokens are there from:  full at - (burst - n) * interval

so a full bucket needs no memory and is forgotten, and the time of the next token is known without counting. Times are
integers in 1/2^32 ns: a rate of 3 per second does not drift, and a rate of a billion is still exact.

The clock: time runs on from where it was when the clock is set back (no tokens are made twice, none are held up), and
a jump forward fills buckets to their burst at most. Rate 0 pauses: no message goes, saved tokens stay for later.
A changed limit keeps the tokens the bucket has, up to the new burst.

Not thread-safe: the caller holds its plane's lock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from basaltmq.errors import InvalidConfigError, LimitExceededError

RATE_MAX: Final = 1e9
"""A token per nanosecond, the grain of the clock."""

RATE_MIN: Final = 1e-6
"""A token in eleven days; slower than that is a pause."""

BURST_MAX: Final = 1_000_000_000

LIMITS_MAX: Final = 100_000
"""Limits are set by operators and kept in memory, about 300 bytes each."""

_SECOND_NS: Final = 1_000_000_000
_FINE: Final = 32
_SWEEP_MIN: Final = 1024
_NUMBER: Final = re.compile(r"\d{1,20}(\.\d{1,20})?([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Limit:
    """Tokens per second, and how many may be saved up."""

    rate: float
    burst: int

    def __post_init__(self) -> None:
        rate, burst = self.rate, self.burst
        if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not math.isfinite(rate):
            raise InvalidConfigError(f"the rate of a throttle is a number of tokens per second, not {rate!r:.80}")
        if rate != 0 and not RATE_MIN <= rate <= RATE_MAX:
            raise InvalidConfigError(f"the rate of a throttle is 0 (pause) or {RATE_MIN} to {RATE_MAX}, not {rate!r}")
        if type(burst) is not int or not 1 <= burst <= BURST_MAX:
            raise InvalidConfigError(f"the burst of a throttle is a whole number, 1 to {BURST_MAX}, not {burst!r:.80}")

    @classmethod
    def parse(cls, text: str) -> Limit:
        """A limit from `rate,burst`, as in `10,20` or `0.5,1`; a burst left out is the rate, at least 1."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2 or not all(_NUMBER.fullmatch(part) for part in parts):
            raise InvalidConfigError(
                f"a throttle is 'rate,burst' as in '10,20' (10 per second, 20 at once), not {text!r:.80}"
            )
        rate = float(parts[0])
        if len(parts) == 1:
            return cls(rate, max(1, min(math.ceil(rate), BURST_MAX)) if math.isfinite(rate) else 1)
        burst = float(parts[1])
        if not burst.is_integer():
            raise InvalidConfigError(f"the burst of a throttle is a whole number of tokens, not {parts[1]!r:.80}")
        return cls(rate, int(burst))


@dataclass(frozen=True)
class Blocked:
    """Why a message cannot go: the key that keeps it longest, and until when (None: paused)."""

    key: str
    until_ns: int | None


class _Pace:
    """A limit in the units buckets count in; interval 0 is a pause."""

    __slots__ = ("burst", "interval", "limit", "span")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.burst = limit.burst
        self.interval = max(1, int(Fraction(_SECOND_NS << _FINE) / Fraction(limit.rate))) if limit.rate else 0
        self.span = (limit.burst - 1) * self.interval


class TokenBuckets:
    """All buckets of a plane. Times handed in and out are the caller's clock, in ns."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}
        # When a bucket is full again; for a paused one the missing tokens, in 1/2^32. Absent: full.
        self._full_at: dict[str, int] = {}
        self._sweep_at = _SWEEP_MIN
        self._clock_ns = 0
        self._ahead_ns = 0

    def __len__(self) -> int:
        """Buckets in memory: those that were not full when last looked at."""
        return len(self._full_at)

    def limit(self, key: str) -> Limit | None:
        pace = self._paces.get(key)
        return None if pace is None else pace.limit

    def set_limit(self, key: str, limit: Limit, now_ns: int) -> None:
        now = self._time(now_ns)
        before = self._paces.get(key)
        if before is None and len(self._paces) >= LIMITS_MAX:
            raise LimitExceededError(
                f"throttle {key!r:.80}: there are {LIMITS_MAX} throttles already; remove some first"
            )
        after = self._paces[key] = _Pace(limit)
        full_at = self._full_at.pop(key, None)
        if before is None or full_at is None:
            return
        missing = full_at if not before.interval else ((max(full_at, now) - now) << _FINE) // before.interval
        have = (before.burst << _FINE) - missing
        missing = (after.burst << _FINE) - min(have, after.burst << _FINE)
        if missing > 0:
            self._full_at[key] = now + (missing * after.interval >> _FINE) if after.interval else missing

    def remove_limit(self, key: str) -> None:
        """Without a limit a key never holds a message."""
        self._paces.pop(key, None)
        self._full_at.pop(key, None)

    def try_take(self, keys: Iterable[str], now_ns: int) -> Blocked | None:
        """Take a token from each of the keys (once each, however often it is named); None when that was done.

        Otherwise nothing was taken, and the answer names the key to wait for. Others may be faster then: ask again.
        """
        now = self._time(now_ns)
        paces = self._paces
        limited = [key for key in keys if key in paces]
        if len(limited) > 1:
            limited = list(dict.fromkeys(limited))
        worst: str | None = None
        worst_at = now
        for key in limited:
            pace = paces[key]
            if not pace.interval:
                return Blocked(key, None)
            at = self._full_at.get(key, 0) - pace.span
            if at > worst_at:
                worst, worst_at = key, at
        if worst is not None:
            return Blocked(worst, self._caller_ns(worst_at))
        for key in limited:
            self._take(key, 1, now)
        return None

    def take_many(self, keys: Iterable[str], count: int, now_ns: int) -> int:
        """Take tokens for up to `count` messages of the same keys; for how many there were."""
        now = self._time(now_ns)
        limited = list(dict.fromkeys(key for key in keys if key in self._paces))
        for key in limited:
            count = min(count, self._available(key, now))
        if count > 0:
            for key in limited:
                self._take(key, count, now)
        return max(count, 0)

    def give_back(self, keys: Iterable[str], now_ns: int, count: int = 1) -> None:
        """Undo `count` takes of these keys: the messages did not go after all."""
        now = self._time(now_ns)
        for key in dict.fromkeys(keys):
            pace = self._paces.get(key)
            full_at = self._full_at.get(key)
            if pace is None or full_at is None:
                continue
            full_at -= count * (pace.interval or 1 << _FINE)
            if full_at <= (now if pace.interval else 0):
                del self._full_at[key]
            else:
                self._full_at[key] = full_at

    def available(self, key: str, now_ns: int) -> int:
        """Whole tokens a key has at this moment; BURST_MAX without a limit, 0 when paused."""
        return self._available(key, self._time(now_ns))

    def available_at(self, key: str, count: int, now_ns: int) -> int | None:
        """When a key has `count` tokens if nobody takes any; None for never (paused, or more than its burst)."""
        now = self._time(now_ns)
        pace = self._paces.get(key)
        if pace is None:
            return now_ns
        if not pace.interval or count > pace.burst:
            return None
        at = self._full_at.get(key, 0) - (pace.burst - count) * pace.interval
        return now_ns if at <= now else self._caller_ns(at)

    def _available(self, key: str, now: int) -> int:
        pace = self._paces.get(key)
        if pace is None:
            return BURST_MAX
        if not pace.interval:
            return 0
        full_at = self._full_at.get(key, 0)
        if full_at <= now:
            return pace.burst
        return max(0, pace.burst + (now - full_at) // pace.interval)

    def _take(self, key: str, count: int, now: int) -> None:
        full_at = self._full_at.get(key, 0)
        if len(self._full_at) >= self._sweep_at:
            self._forget_full(now)
        self._full_at[key] = max(full_at, now) + count * self._paces[key].interval

    def _forget_full(self, now: int) -> None:
        """Costs a look at each bucket, and is due again only when their number has doubled."""
        paces = self._paces
        self._full_at = {key: at for key, at in self._full_at.items() if at > now or not paces[key].interval}
        self._sweep_at = max(_SWEEP_MIN, 2 * len(self._full_at))

    def _time(self, now_ns: int) -> int:
        """The caller's clock as a time that never goes back."""
        if now_ns < self._clock_ns:
            self._ahead_ns += self._clock_ns - now_ns
        self._clock_ns = now_ns
        return (now_ns + self._ahead_ns) << _FINE

    def _caller_ns(self, at: int) -> int:
        """Rounded up, so that what was waited for is there."""
        return -(-at >> _FINE) - self._ahead_ns
