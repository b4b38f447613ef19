"""Failed logins delay the next ones, by user and address, and never lock a user out permanently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from basaltmq.broker.auth import login_throttle as module
from basaltmq.broker.auth.login_throttle import WAIT_S_MAX, LoginThrottle
from basaltmq.broker.peer import Peer, peer_at
from basaltmq.errors import AuthenticationError, TooManyLoginsError

ATTACKER = peer_at("192.0.2.1")
HOME = peer_at("198.51.100.7")


class Harness:
    """A throttle whose clock advances only in sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept_s: list[float] = []
        self.throttle = LoginThrottle(lambda: self.now_s, self.sleep)

    async def sleep(self, wait_s: float) -> None:
        self.slept_s.append(wait_s)
        self.now_s += wait_s

    async def log_in(self, name: str, peer: Peer, *, is_right: bool = False) -> float:
        """Return the delay, or -1 if the login was refused without a check."""
        began_s = self.now_s
        try:
            async with self.throttle.attempt(name, peer):
                if not is_right:
                    raise AuthenticationError("wrong")
        except TooManyLoginsError:
            return -1
        except AuthenticationError:
            pass
        return self.now_s - began_s


def run(test: Callable[[Harness], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(Harness()), 30))


def test_the_delay_grows_to_a_cap_and_decays() -> None:
    async def test(harness: Harness) -> None:
        delays = [await harness.log_in("ann", ATTACKER) for _ in range(8)]
        assert delays == [0, 0, 0, 0.5, 1, 2, 4, -1]
        refused = [await harness.log_in("ann", ATTACKER) for _ in range(50)]
        assert set(refused) == {-1}, "what is refused unseen does not lengthen the wait"
        harness.now_s += 8
        assert await harness.log_in("ann", ATTACKER) == 0
        for _ in range(40):
            harness.now_s += 31
            assert await harness.log_in("ann", ATTACKER) == 0, "30 s are the most that is waited for"
        harness.now_s += 600
        assert await harness.log_in("ann", ATTACKER) == 0
        assert await harness.log_in("ann", ATTACKER) == 0, "failures are forgotten"

    run(test)


def test_a_valid_password_ends_the_delay_of_its_user_at_that_address() -> None:
    async def test(harness: Harness) -> None:
        for _ in range(5):
            await harness.log_in("ann", HOME)
        assert await harness.log_in("ann", HOME, is_right=True) == 2
        assert await harness.log_in("ann", HOME, is_right=True) == 0
        assert await harness.log_in("ann", HOME) == 0

    run(test)


def test_a_user_waits_at_most_a_second_at_new_addresses_and_not_at_known_ones() -> None:
    async def test(harness: Harness) -> None:
        await harness.log_in("ann", HOME, is_right=True)
        for _ in range(200):
            await harness.log_in("ann", ATTACKER)
            harness.now_s += 3
        assert await harness.log_in("ann", HOME, is_right=True) == 0
        assert await harness.log_in("ann", peer_at("203.0.113.9"), is_right=True) <= 1

    run(test)


def test_guesses_of_many_names_delay_their_address() -> None:
    async def test(harness: Harness) -> None:
        for number in range(40):
            await harness.log_in(f"user-{number}", ATTACKER)
        assert 0 < await harness.log_in("another", ATTACKER) <= 2
        assert await harness.log_in("another", HOME) == 0

    run(test)


def test_wrong_logins_of_other_names_do_not_delay_a_user_at_an_address_where_it_is_known() -> None:
    async def test(harness: Harness) -> None:
        await harness.log_in("ann", HOME, is_right=True)
        for number in range(200):
            await harness.log_in(f"user-{number}", HOME)
        await asyncio.gather(*(harness.log_in(f"more-{number}", HOME) for number in range(20)))
        assert await harness.log_in("bob", HOME, is_right=True) != 0
        assert await harness.log_in("ann", HOME, is_right=True) == 0
        delays = [await harness.log_in("ann", HOME) for _ in range(8)]
        assert delays == [0, 0, 0, 0.5, 1, 2, 4, -1], "guesses of its password are delayed as everywhere"

    run(test)


def test_a_burst_of_guesses_in_parallel_is_checked_one_by_one() -> None:
    async def test(harness: Harness) -> None:
        checked = 0

        async def guess() -> None:
            nonlocal checked
            async with harness.throttle.attempt("ann", ATTACKER):
                checked += 1
                await asyncio.sleep(0)
                raise AuthenticationError("wrong")

        done = await asyncio.gather(*(guess() for _ in range(100)), return_exceptions=True)
        assert checked < 10
        assert sum(isinstance(each, TooManyLoginsError) for each in done) == 100 - checked
        assert not harness.throttle._turns, "nothing is left of attempts that ended"

    run(test)


def test_many_connections_of_one_client_with_the_right_password_do_not_wait() -> None:
    async def test(harness: Harness) -> None:
        done = await asyncio.gather(*(harness.log_in("ann", HOME, is_right=True) for _ in range(500)))
        assert set(done) == {0}

    run(test)


def test_throttle_tables_are_bounded_and_group_ipv6_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES_MAX", 50)

    async def test(harness: Harness) -> None:
        for number in range(300):
            await harness.log_in(f"user-{number}" * 1000, peer_at(f"10.0.0.{number % 256}"))
            await harness.log_in(f"user-{number}", peer_at(f"10.1.0.{number % 256}"), is_right=True)
        throttle = harness.throttle
        tables = (throttle._pairs, throttle._addresses, throttle._users, throttle._known)
        assert all(len(table) <= 50 for table in tables)
        delays = [await harness.log_in("ann", peer_at(f"2001:db8::{number:x}")) for number in range(8)]
        assert delays[-1] == -1

    run(test)


def test_a_login_refused_without_a_check_names_the_time_to_retry() -> None:
    error = TooManyLoginsError("x", 7.0)
    assert (error.retriable, error.retry_after_s, WAIT_S_MAX < 7.0) == (True, 7.0, True)
