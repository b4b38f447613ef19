"""Token buckets by throttle key (SPEC C11).

A limit is a rate (tokens per second) and a burst (most tokens saved up). A message names throttle keys. It may be
delivered when each of its keys with a limit has a token. It then takes one token from each, all or none. gate.py holds
the waiting messages. The limits come from the runtime configuration (`throttle.<key>`).

A bucket is one number, the time at which it will be full again:

    missing tokens = (full at - now) / interval      taking a token:  full at = max(full at, now) + interval
    n tokens are available from:  full at - (burst - n) * interval

So a full bucket needs no memory, and the time of the next token is known without counting. Times are integers in 1/2^32
ns: a rate of 3 per second does not drift, and a rate of a billion is exact.

Clock: if the clock is set back, time continues from where it was, so no token is created twice and none is delayed. A
jump forward fills buckets to their burst at most. Rate 0 pauses: no message is delivered, and saved tokens are kept. A
changed limit keeps the bucket's tokens, up to the new burst.

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
"""Tokens per second: one per nanosecond, the resolution of the clock."""

RATE_MIN: Final = 1e-6
"""Tokens per second: one in eleven days. Use rate 0 to pause."""

BURST_MAX: Final = 1_000_000_000

LIMITS_MAX: Final = 100_000
"""Throttles per plane. Operators set them; each takes about 300 bytes of memory."""

_SECOND_NS: Final = 1_000_000_000
_FRACTION_BITS: Final = 32
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
            raise InvalidConfigError(f"a throttle rate must be a number of tokens per second, got {rate!r:.80}")
        if rate != 0 and not RATE_MIN <= rate <= RATE_MAX:
            raise InvalidConfigError(f"a throttle rate must be 0 (pause) or {RATE_MIN} to {RATE_MAX}, got {rate!r}")
        if type(burst) is not int or not 1 <= burst <= BURST_MAX:
            raise InvalidConfigError(f"a throttle burst must be an integer, 1 to {BURST_MAX}, got {burst!r:.80}")

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Parse `rate,burst`, as in `10,20` or `0.5,1`. The default burst is the rate, at least 1."""
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2 or not all(_NUMBER.fullmatch(part) for part in parts):
            raise InvalidConfigError(
                f"a throttle must be 'rate,burst' as in '10,20' (10 per second, 20 at once), got {text!r:.80}"
            )
        rate = float(parts[0])
        if len(parts) == 1:
            return cls(rate, max(1, min(math.ceil(rate), BURST_MAX)) if math.isfinite(rate) else 1)
        burst = float(parts[1])
        if not burst.is_integer():
            raise InvalidConfigError(f"a throttle burst must be an integer, got {parts[1]!r:.80}")
        return cls(rate, int(burst))


@dataclass(frozen=True)
class Blocked:
    """Why a message cannot be delivered: the key that blocks it longest, and until when (None: paused)."""

    key: str
    until_ns: int | None


class _Pace:
    """A limit in the units of the buckets. Interval 0 is a pause."""

    __slots__ = ("burst", "interval", "limit", "span")

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.burst = limit.burst
        self.interval = max(1, int(Fraction(_SECOND_NS << _FRACTION_BITS) / Fraction(limit.rate))) if limit.rate else 0
        self.span = (limit.burst - 1) * self.interval


class TokenBuckets:
    """All buckets of a plane. Arguments and results are times of the caller's clock, in ns."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}
        # When a bucket is full again. For a paused bucket: the missing tokens, in 1/2^32. Absent: full.
        self._full_at: dict[str, int] = {}
        self._sweep_at = _SWEEP_MIN
        self._clock_ns = 0
        self._clock_offset_ns = 0

    def __len__(self) -> int:
        """Buckets in memory: those that were not full when last checked."""
        return len(self._full_at)

    def limit(self, key: str) -> Limit | None:
        pace = self._paces.get(key)
        return None if pace is None else pace.limit

    def set_limit(self, key: str, limit: Limit, now_ns: int) -> None:
        now = self._time(now_ns)
        before = self._paces.get(key)
        if before is None and len(self._paces) >= LIMITS_MAX:
            raise LimitExceededError(
                f"throttle {key!r:.80}: the limit of {LIMITS_MAX} throttles is reached; remove some first"
            )
        after = self._paces[key] = _Pace(limit)
        full_at = self._full_at.pop(key, None)
        if before is None or full_at is None:
            return
        missing = full_at if not before.interval else ((max(full_at, now) - now) << _FRACTION_BITS) // before.interval
        have = (before.burst << _FRACTION_BITS) - missing
        missing = (after.burst << _FRACTION_BITS) - min(have, after.burst << _FRACTION_BITS)
        if missing > 0:
            self._full_at[key] = now + (missing * after.interval >> _FRACTION_BITS) if after.interval else missing

    def remove_limit(self, key: str) -> None:
        """Remove a key's limit. The key then blocks no message."""
        self._paces.pop(key, None)
        self._full_at.pop(key, None)

    def try_take(self, keys: Iterable[str], now_ns: int) -> Blocked | None:
        """Take one token from each distinct key, and return None. If a token is missing, take none and return the key
        that blocks longest.

        Another key may block when that one has a token: call again.
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
            self._take(key, now)
        return None

    def give_back(self, keys: Iterable[str], now_ns: int, count: int = 1) -> None:
        """Undo `count` takes of these keys, because the messages were not delivered."""
        now = self._time(now_ns)
        for key in dict.fromkeys(keys):
            pace = self._paces.get(key)
            full_at = self._full_at.get(key)
            if pace is None or full_at is None:
                continue
            full_at -= count * (pace.interval or 1 << _FRACTION_BITS)
            if full_at <= (now if pace.interval else 0):
                del self._full_at[key]
            else:
                self._full_at[key] = full_at

    def available(self, key: str, now_ns: int) -> int:
        """Return the whole tokens of a key now: BURST_MAX without a limit, 0 when paused."""
        return self._available(key, self._time(now_ns))

    def available_at(self, key: str, count: int, now_ns: int) -> int | None:
        """Return when a key has `count` tokens if none are taken. None: never (paused, or more than its burst)."""
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

    def _take(self, key: str, now: int) -> None:
        full_at = self._full_at.get(key, 0)
        if len(self._full_at) >= self._sweep_at:
            self._forget_full(now)
        self._full_at[key] = max(full_at, now) + self._paces[key].interval

    def _forget_full(self, now: int) -> None:
        """Drop full buckets. It visits every bucket, so it runs again only when their number has doubled."""
        paces = self._paces
        self._full_at = {key: at for key, at in self._full_at.items() if at > now or not paces[key].interval}
        self._sweep_at = max(_SWEEP_MIN, 2 * len(self._full_at))

    def _time(self, now_ns: int) -> int:
        """Convert the caller's clock to a time that never goes back."""
        if now_ns < self._clock_ns:
            self._clock_offset_ns += self._clock_ns - now_ns
        self._clock_ns = now_ns
        return (now_ns + self._clock_offset_ns) << _FRACTION_BITS

    def _caller_ns(self, at: int) -> int:
        """Convert to the caller's clock, rounded up, so that the token is available at that time."""
        return -(-at >> _FRACTION_BITS) - self._clock_offset_ns
