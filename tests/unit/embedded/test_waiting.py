"""Waits: woken by arrivals, ended by the time limit or by close."""

from __future__ import annotations

from typing import Any

import pytest

from basaltmq.embedded.waiting import Arrivals, WaitLimit
from basaltmq.errors import InvalidArgumentError


def test_an_expired_wait_limit_ends_the_wait_although_records_arrived() -> None:
    arrivals = Arrivals()
    seen = arrivals.count
    arrivals.wake()
    assert not arrivals.wait(seen, WaitLimit(0))
    assert arrivals.wait(seen, WaitLimit(30))
    assert arrivals.wait(seen, WaitLimit(None))
    assert not arrivals.wait(arrivals.count, WaitLimit(0.01))


def test_close_ends_every_wait() -> None:
    arrivals = Arrivals()
    arrivals.close()
    assert arrivals.closed
    assert not arrivals.wait(arrivals.count, WaitLimit(None))
    assert not arrivals.wait(arrivals.count + 1, WaitLimit(30))


@pytest.mark.parametrize("wait", [-1, -0.5, "1", True, object()])
def test_wait_limit_refuses_invalid_times(wait: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        WaitLimit(wait)
