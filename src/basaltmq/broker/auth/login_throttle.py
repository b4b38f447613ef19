"""Login throttle: failed logins delay later attempts by user and address, by address, and by user.

    failures of      free   delay before the next attempt     reason
    user + address      3   0.5 s, doubling up to 30 s         guessing one password
    address            20   0.1 s, doubling up to  2 s         trying many names; users behind a NAT share it
    user               20   0.1 s, doubling up to  1 s         many addresses guessing one password

An attempt that would wait longer than WAIT_S_MAX is refused at once and not counted, so a delay only grows when a
password is checked. Failure counts have a half-life of 60 s, so no user is locked out permanently. A user that has
logged in from an address is delayed there only by its own failures. Otherwise anybody behind the same proxy or NAT
could lock it out with wrong logins of other names.

Attempts of one user and address run one after the other, so parallel attempts gain nothing. The connections of one
client wait for its first password check and then share its result. A delay is a sleep of the caller's task. All tables
are bounded LRU caches. They store hashes of names, because clients choose the length of a name.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Final

from basaltmq.broker.peer import Peer
from basaltmq.errors import AuthenticationError, TooManyLoginsError

ENTRIES_MAX: Final = 16_384
"""Maximum entries per table: about 4 MiB."""

WAIT_S_MAX: Final = 5.0
"""Half of the default handshake timeout, which closes the connection of a waiting client."""

HALF_LIFE_S: Final = 60.0
COUNT_MAX: Final = 64.0
"""Maximum failure count. It decays to zero within ten half-lives."""

_IPV6_NETWORK_BITS: Final = 64
"""A customer has at least a /64, so all its addresses count as one."""


class _Failures:
    __slots__ = ("count", "free_at_s", "seen_s")

    def __init__(self, now_s: float) -> None:
        self.count = 0.0
        self.seen_s = now_s
        self.free_at_s = now_s
        """Earliest time of the next attempt."""

    def count_at(self, now_s: float) -> float:
        return self.count * math.exp2((self.seen_s - now_s) / HALF_LIFE_S)


class _Table:
    """Failure counts by key."""

    def __init__(self, free: int, delay_s: float, delay_s_max: float) -> None:
        self._free = free
        self._delay_s = delay_s
        self._delay_s_max = delay_s_max
        self._entries: OrderedDict[Hashable, _Failures] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def wait_s(self, key: Hashable, now_s: float) -> float:
        found = self._entries.get(key)
        return 0.0 if found is None else max(0.0, found.free_at_s - now_s)

    def reserve(self, key: Hashable, now_s: float) -> None:
        """Reserve the earliest time for an attempt, so that the next one waits longer."""
        found = self._entries.get(key)
        if found is not None:
            found.free_at_s = max(found.free_at_s, now_s) + self._delay_of(found, now_s)

    def failed(self, key: Hashable, now_s: float) -> None:
        found = self._entries.get(key)
        if found is None:
            found = self._entries[key] = _Failures(now_s)
        self._entries.move_to_end(key)
        found.count = min(COUNT_MAX, found.count_at(now_s) + 1)
        found.seen_s = now_s
        found.free_at_s = max(found.free_at_s, now_s + self._delay_of(found, now_s))
        while len(self._entries) > ENTRIES_MAX:
            self._entries.popitem(last=False)

    def clear(self, key: Hashable) -> None:
        self._entries.pop(key, None)

    def _delay_of(self, found: _Failures, now_s: float) -> float:
        beyond = round(found.count_at(now_s)) - self._free
        return 0.0 if beyond < 0 else min(self._delay_s_max, self._delay_s * 2.0 ** min(beyond, 32))


class LoginThrottle:
    """Tracks the failed logins of a node."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep = sleep
        self._pairs = _Table(free=3, delay_s=0.5, delay_s_max=30.0)
        self._addresses = _Table(free=20, delay_s=0.1, delay_s_max=2.0)
        self._users = _Table(free=20, delay_s=0.1, delay_s_max=1.0)
        self._known: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        """Pairs of user and address with a successful login."""
        self._turns: dict[tuple[bytes, str], tuple[asyncio.Lock, int]] = {}
        """Attempts in progress: a lock, and the number of tasks that hold or await it."""

    @asynccontextmanager
    async def attempt(self, name: str, peer: Peer) -> AsyncIterator[None]:
        """Delay, then enter one check of credentials. An AuthenticationError raised inside counts as a failure."""
        user = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
        pair = (user, _network(peer.address))
        lock, count = self._turns.get(pair) or (asyncio.Lock(), 0)
        self._turns[pair] = (lock, count + 1)
        try:
            async with lock:
                await self._wait(pair)
                try:
                    yield
                except TooManyLoginsError:
                    raise
                except AuthenticationError:
                    self._failed(pair)
                    raise
                self._succeeded(pair)
        finally:
            lock, count = self._turns[pair]
            if count == 1:
                del self._turns[pair]
            else:
                self._turns[pair] = (lock, count - 1)

    async def _wait(self, pair: tuple[bytes, str]) -> None:
        user, address = pair
        now_s = self._clock_s()
        is_known = pair in self._known
        wait_s = self._pairs.wait_s(pair, now_s)
        if not is_known:
            wait_s = max(wait_s, self._addresses.wait_s(address, now_s), self._users.wait_s(user, now_s))
        if wait_s > WAIT_S_MAX:
            raise TooManyLoginsError(f"too many failed logins; try again in {wait_s:.0f} s", wait_s)
        if not is_known:
            self._addresses.reserve(address, now_s)
        if wait_s > 0:
            await self._sleep(wait_s)

    def _failed(self, pair: tuple[bytes, str]) -> None:
        now_s = self._clock_s()
        self._pairs.failed(pair, now_s)
        self._addresses.failed(pair[1], now_s)
        self._users.failed(pair[0], now_s)

    def _succeeded(self, pair: tuple[bytes, str]) -> None:
        self._pairs.clear(pair)
        self._known[pair] = None
        self._known.move_to_end(pair)
        while len(self._known) > ENTRIES_MAX:
            self._known.popitem(last=False)


def _network(address: str) -> str:
    """Return the network that counts as one address."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address, _IPV6_NETWORK_BITS), strict=False))
