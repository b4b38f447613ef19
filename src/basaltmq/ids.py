"""Message ids: UUIDv7 as 16 plain bytes, strictly increasing per generator (SPEC C3).

    | unix time ms 48 | version 4 | counter high 12 | variant 2 | counter low 30 | random 32 |

RFC 9562, method 1: the counter begins each millisecond at a random place in its lower half and grows by one per id.
When the clock stands still or goes back the last millisecond is kept and the counter goes on; when the counter is
used up the millisecond is moved ahead of the clock. So ids of one generator always sort in the order they were made.
Two generators never share an id as long as their 32 random bits differ in the same millisecond at the same count.

Random bytes come from the system some thousands at a time, and are never used by two processes. Asking for those of
each call would let go of the interpreter in every call: a thread that waits for it is woken each time, in vain as a
rule, at the cost of both.

Budget: an id of a batch costs about 0.15 us; a UUID object would cost ten times that.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from itertools import repeat
from struct import Struct
from typing import Final
from uuid import UUID

from basaltmq.errors import InvalidArgumentError

ID_BYTES: Final = 16
MANY_MAX: Final = 1 << 20
"""Ids asked for at once: 64 MiB of Python objects; a larger batch would not fit a store's batch either."""

POOL_BYTES: Final = 8192
"""Random bytes asked for at once: two thousand ids, some twenty microseconds of the system's."""

_ID: Final = Struct(">8sI4s")
_COUNTER_BITS: Final = 42
_LOW_BITS: Final = 30
_RANDOM_BYTES: Final = 4
_LOW_MASK: Final = (1 << _LOW_BITS) - 1
_SEED_MASK: Final = (1 << (_COUNTER_BITS - 1)) - 1
_TIME_MS_MAX: Final = (1 << 48) - 1
_VERSION: Final = 0x7000
_VARIANT: Final = 1 << 31


class Ids:
    """A generator of ids. Safe to share between threads."""

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = os.urandom,
        process: Callable[[], int] = os.getpid,
    ) -> None:
        self._clock_ns = clock_ns
        self._random_bytes = random_bytes
        self._process = process
        self._lock = threading.Lock()
        self._time_ms = -1
        self._counter = 0
        self._pool = b""
        self._pool_at = 0
        self._pool_of = -1
        """The process that asked for the pool: a child has bytes of its own."""
        self._split = Struct("")
        """Takes the random bytes of a call apart; kept, because calls are mostly of one size."""

    def next(self) -> bytes:
        return self.many(1)[0]

    def many(self, count: int) -> list[bytes]:
        """`count` ids in increasing order."""
        if not 0 <= count <= MANY_MAX:
            raise InvalidArgumentError(f"{count} ids at once: ask for 0 to {MANY_MAX}")
        made: list[bytes] = []
        while len(made) < count:
            time_ms, counter, size, random = self._reserve(count - len(made))
            split = self._split
            if split.size != _RANDOM_BYTES * size:
                split = self._split = Struct(f"{_RANDOM_BYTES}s" * size)
            made += _build(time_ms, counter, split.unpack(random))
        return made

    def _reserve(self, count: int) -> tuple[int, int, int, bytes]:
        """Take up to `count` values of the counter that share their high bits: (time, first value, how many), and
        random bytes for as many."""
        with self._lock:
            if self._process() != self._pool_of:
                self._pool = b""
            time_ms = self._clock_ns() // 1_000_000
            if time_ms > self._time_ms:
                self._begin(time_ms)
            elif self._counter >> _COUNTER_BITS:
                self._begin(self._time_ms + 1)
            counter = self._counter
            size = min(count, (1 << _LOW_BITS) - (counter & _LOW_MASK))
            self._counter = counter + size
            return self._time_ms, counter, size, self._random(_RANDOM_BYTES * size)

    def _begin(self, time_ms: int) -> None:
        if not 0 <= time_ms <= _TIME_MS_MAX:
            raise InvalidArgumentError(f"the clock says {time_ms} ms since 1970, which a UUIDv7 cannot hold")
        self._time_ms = time_ms
        self._counter = int.from_bytes(self._random(8), "big") & _SEED_MASK

    def _random(self, size: int) -> bytes:
        """So many random bytes that nobody has had."""
        end = self._pool_at + size
        if end > len(self._pool):
            if size > POOL_BYTES:
                return self._random_bytes(size)
            self._pool = self._random_bytes(POOL_BYTES)
            self._pool_of = self._process()
            self._pool_at, end = 0, size
        taken = self._pool[self._pool_at : end]
        self._pool_at = end
        return taken


def _build(time_ms: int, counter: int, tails: tuple[bytes, ...]) -> Iterable[bytes]:
    high = (time_ms << 16 | _VERSION | counter >> _LOW_BITS).to_bytes(8, "big")
    first = _VARIANT | counter & _LOW_MASK
    return map(_ID.pack, repeat(high), range(first, first + len(tails)), tails)


def are_gapless(first: bytes, last: bytes, count: int) -> bool:
    """Whether so many ids of one generator, of which these are the first and the last, are all it made from one to the
    other."""
    # The random end of an id says nothing of the order.
    begin, end = first[:-_RANDOM_BYTES], last[:-_RANDOM_BYTES]
    return int.from_bytes(end, "big") - int.from_bytes(begin, "big") == count - 1


def format_id(message_id: bytes) -> str:
    """The usual text of an id: 8-4-4-4-12 hex digits."""
    text = check_id(message_id).hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def parse_id(text: str) -> bytes:
    """The id behind its usual text."""
    try:
        parsed = UUID(text).bytes
    except (ValueError, AttributeError, TypeError):
        parsed = b""
    if not parsed or format_id(parsed) != text.lower():
        raise InvalidArgumentError(f"{text!r} is not a message id: write 32 hex digits as 8-4-4-4-12")
    return parsed


def id_time_ms(message_id: bytes) -> int:
    """When an id was made."""
    return int.from_bytes(check_id(message_id)[:6], "big")


def check_id(message_id: bytes) -> bytes:
    if not isinstance(message_id, bytes) or len(message_id) != ID_BYTES:
        raise InvalidArgumentError(f"a message id is {ID_BYTES} bytes, not {message_id!r:.80}")
    return message_id
