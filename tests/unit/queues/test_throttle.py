"""Token buckets with a manual clock, and the gate that parks throttled messages."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basaltmq.errors import InvalidConfigError, LimitExceededError
from basaltmq.queues.ready.fair_scheduler import FairScheduler
from basaltmq.queues.throttle import token_buckets as throttle
from basaltmq.queues.throttle.gate import ThrottleGate
from basaltmq.queues.throttle.token_buckets import BURST_MAX, RATE_MAX, RATE_MIN, Blocked, Limit, TokenBuckets

pytestmark = [pytest.mark.spec("C11"), pytest.mark.promise("P8")]

S = 1_000_000_000
T0 = 1_700_000_000 * S


def buckets(**limits: tuple[float, int]) -> TokenBuckets:
    made = TokenBuckets()
    for key, (rate, burst) in limits.items():
        made.set_limit(key, Limit(rate, burst), T0)
    return made


def taken(target: TokenBuckets, keys: tuple[str, ...], now_ns: int, most: int = 10_000) -> int:
    """Return how many messages pass at this time."""
    count = 0
    while count < most and target.try_take(keys, now_ns) is None:
        count += 1
    return count


def test_burst_passes_at_once_then_the_rate_applies() -> None:
    target = buckets(x=(10, 5))
    assert taken(target, ("x",), T0) == 5
    assert target.try_take(("x",), T0) == Blocked("x", T0 + S // 10)
    assert target.try_take(("x",), T0 + S // 10 - 1) == Blocked("x", T0 + S // 10)
    assert target.try_take(("x",), T0 + S // 10) is None
    assert taken(target, ("x",), T0 + S) == 5
    assert taken(target, ("x",), T0 + 100 * S) == 5


def test_keys_without_a_limit_hold_no_message() -> None:
    target = buckets(x=(1, 1))
    assert taken(target, ("free",), T0, 1000) == 1000
    assert taken(target, (), T0, 1000) == 1000
    assert len(target) == 0
    assert target.available("free", T0) == BURST_MAX
    assert target.available_at("free", 5, T0) == T0


def test_tokens_are_taken_from_all_keys_or_none() -> None:
    target = buckets(x=(1, 3), y=(1, 1))
    assert target.try_take(("x", "y"), T0) is None
    assert target.try_take(("x", "y"), T0) == Blocked("y", T0 + S)
    assert target.try_take(("y", "x"), T0) == Blocked("y", T0 + S)
    assert target.available("x", T0) == 2, "the refused message took nothing"
    assert taken(target, ("x",), T0) == 2


def test_blocked_message_waits_for_the_latest_of_its_keys() -> None:
    target = buckets(fast=(10, 1), slow=(0.5, 1), paused=(0, 1))
    assert target.try_take(("fast", "slow"), T0) is None
    assert target.try_take(("fast", "slow"), T0) == Blocked("slow", T0 + 2 * S)
    assert target.try_take(("slow", "fast"), T0) == Blocked("slow", T0 + 2 * S)
    assert target.try_take(("fast", "slow"), T0 + 2 * S) is None
    assert target.try_take(("slow", "paused", "fast"), T0) == Blocked("paused", None)


def test_duplicate_key_takes_one_token() -> None:
    target = buckets(x=(1, 2))
    assert target.try_take(("x", "x", "x"), T0) is None
    assert target.available("x", T0) == 1


def test_fractional_rates_do_not_drift() -> None:
    target = buckets(x=(3, 1))
    now, count = T0, 0
    while now < T0 + 1000 * S:
        blocked = target.try_take(("x",), now)
        if blocked is None:
            count += 1
        else:
            assert blocked.until_ns is not None
            assert blocked.until_ns > now
            now = blocked.until_ns
    assert abs(count - 3000) <= 1


@pytest.mark.parametrize("rate", [RATE_MIN, 0.001, 0.3, 1, 7, 1e5, 1e9])
def test_token_is_available_exactly_at_the_returned_time(rate: float) -> None:
    target = buckets(x=(rate, 1))
    now = T0
    for _ in range(50):
        assert target.try_take(("x",), now) is None
        blocked = target.try_take(("x",), now)
        assert blocked is not None
        assert blocked.until_ns is not None
        assert target.try_take(("x",), blocked.until_ns - 1) is not None
        assert abs(blocked.until_ns - now - S / rate) <= 1 + S / rate * 1e-9
        now = blocked.until_ns


def test_pause_blocks_and_keeps_saved_tokens() -> None:
    target = buckets(x=(10, 4))
    assert taken(target, ("x",), T0, 1) == 1
    target.set_limit("x", Limit(0, 4), T0)
    assert target.try_take(("x",), T0 + 1000 * S) == Blocked("x", None)
    assert target.available("x", T0 + 1000 * S) == 0
    assert target.available_at("x", 1, T0 + 1000 * S) is None
    target.give_back(("x",), T0 + 1000 * S)
    target.set_limit("x", Limit(0.001, 4), T0 + 1000 * S)
    assert taken(target, ("x",), T0 + 1000 * S) == 4
    target.set_limit("x", Limit(0, 4), T0 + 1000 * S)
    target.set_limit("x", Limit(1, 4), T0 + 2000 * S)
    assert taken(target, ("x",), T0 + 2000 * S) == 0


def test_changed_limit_keeps_existing_tokens() -> None:
    target = buckets(x=(1, 10))
    assert taken(target, ("x",), T0, 6) == 6
    target.set_limit("x", Limit(100, 10), T0)
    assert target.available("x", T0) == 4
    assert target.available_at("x", 5, T0) == T0 + S // 100
    target.set_limit("x", Limit(100, 2), T0)
    assert target.available("x", T0) == 2
    target.set_limit("x", Limit(1, 50), T0)
    assert target.available("x", T0) in (2, 50), "a full bucket may stay full"
    target.remove_limit("x")
    assert taken(target, ("x",), T0, 1000) == 1000
    assert target.limit("x") is None
    assert len(target) == 0


def test_higher_rate_shortens_a_current_wait() -> None:
    target = buckets(x=(0.001, 1))
    assert target.try_take(("x",), T0) is None
    target.set_limit("x", Limit(1, 1), T0 + 500 * S)
    assert target.try_take(("x",), T0 + 500 * S) == Blocked("x", T0 + 500 * S + S // 2)


def test_clock_set_back_neither_adds_nor_delays_tokens() -> None:
    target = buckets(x=(1, 1))
    assert target.try_take(("x",), T0) is None
    back = T0 - 3600 * S
    assert target.try_take(("x",), back) == Blocked("x", back + S)
    assert target.try_take(("x",), back + S) is None
    count, now = 0, back + S
    for _ in range(1000):
        now -= 10 * S
        count += taken(target, ("x",), now)
        now += S // 2
        count += taken(target, ("x",), now)
    assert 499 <= count <= 500, "each step advances half a second"


def test_clock_jump_forward_fills_at_most_to_the_burst() -> None:
    target = buckets(x=(1000, 7))
    taken(target, ("x",), T0)
    assert taken(target, ("x",), T0 + 10**9 * S) == 7


def test_returned_tokens_fill_at_most_to_the_burst() -> None:
    target = buckets(x=(1, 10), y=(1, 4))
    assert taken(target, ("x", "y", "free"), T0) == 4
    assert (target.available("x", T0), target.available("y", T0)) == (6, 0)
    target.give_back(("x", "y"), T0, 2)
    assert (target.available("x", T0), target.available("y", T0)) == (8, 2)
    target.give_back(("x", "y", "free"), T0, 50)
    assert (target.available("x", T0), target.available("y", T0)) == (10, 4)


def test_full_buckets_are_removed_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TokenBuckets()
    for number in range(20_000):
        target.set_limit(f"k{number}", Limit(1, 1), T0)
    assert len(target) == 0
    for number in range(20_000):
        assert target.try_take((f"k{number}",), T0 + number * S // 100) is None
    assert len(target) <= 2048, "at most 200 buckets are not full"
    monkeypatch.setattr(throttle, "LIMITS_MAX", 20_000)
    target.set_limit("k0", Limit(2, 2), T0)
    with pytest.raises(LimitExceededError, match="remove some"):
        target.set_limit("one more", Limit(1, 1), T0)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0.01, 1000),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(-2 * S, 3 * S), st.integers(0, 10)), max_size=40),
)
def test_messages_never_exceed_burst_and_rate(rate: float, burst: int, steps: list[tuple[int, int]]) -> None:
    target = TokenBuckets()
    target.set_limit("x", Limit(rate, burst), T0)
    now, passed_ns, total = T0, 0, 0
    for move, tries in steps:
        now += move
        passed_ns += max(move, 0)
        total += taken(target, ("x",), now, tries)
        assert total <= burst + rate * passed_ns / S + 1e-6
        at = target.available_at("x", 1, now)
        assert at is not None
        assert (at == now) == (target.available("x", now) > 0)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("10,20", Limit(10, 20)),
        (" 0.5 , 1 ", Limit(0.5, 1)),
        ("0,5", Limit(0, 5)),
        ("1e3,2e3", Limit(1000, 2000)),
        ("2.5", Limit(2.5, 3)),
        ("0", Limit(0, 1)),
        (f"{RATE_MAX},{BURST_MAX}", Limit(RATE_MAX, BURST_MAX)),
    ],
)
def test_limits_are_parsed_from_text(text: str, limit: Limit) -> None:
    assert Limit.parse(text) == limit


@pytest.mark.parametrize(
    "text",
    ["", ",", "10,", "a,b", "-1,5", "10,0", "10,-1", "10,1.5", "1,2,3", "nan,1", "inf,1", "1e999,1", "1e999", "1e10,1",
     "1e-9,1", "10 20", "10;20", "1_0,1", "٣,1", "1,1e20", "0x10,1", "9" * 400 + ",1"],
)  # fmt: skip
def test_invalid_limits_are_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="throttle"):
        Limit.parse(text)


@pytest.mark.parametrize(("rate", "burst"), [("1", 1), (True, 1), (1, True), (1, 1.0), (float("nan"), 1), (1, 0)])
def test_limits_of_the_wrong_type_are_refused(rate: object, burst: object) -> None:
    with pytest.raises(InvalidConfigError, match=r"a throttle (rate|burst) must be"):
        Limit(rate, burst)  # type: ignore[arg-type]


class Queue:
    """A queue that uses the gate. The clock only advances to `next_wake_ns`."""

    def __init__(self, target: TokenBuckets, skip_max: int = 128, parked_max: int = 100_000) -> None:
        self.buckets = target
        self.gate: ThrottleGate[str] = ThrottleGate(target, skip_max=skip_max, parked_max=parked_max)
        self.scheduler = FairScheduler()
        self.fresh: dict[str, deque[tuple[str, tuple[str, ...]]]] = {}
        self.now = T0
        self.out: list[tuple[int, str, str]] = []
        self.fetches = 0

    def put(self, fairness_key: str, message: str, *keys: str) -> None:
        self.fresh.setdefault(fairness_key, deque()).append((message, keys))
        self.scheduler.ready(fairness_key)

    def fetch(self, fairness_key: str, most: int) -> tuple[int, bool]:
        self.fetches += 1
        got = 0
        fresh = self.fresh[fairness_key]
        while got < most:
            popped = self.gate.pop(fairness_key, self.now)
            if popped is not None:
                message = popped[0]
            elif fresh and self.gate.can_fetch(fairness_key):
                message, keys = fresh.popleft()
                if not self.gate.admit(fairness_key, message, keys, self.now):
                    continue
            else:
                if fresh or self.gate.count(fairness_key):
                    self.scheduler.block(fairness_key)
                return got, False
            self.out.append((self.now, fairness_key, message))
            got += 1
        return got, True

    def run(self, until_ns: int, most: int = 10_000) -> None:
        while True:
            for fairness_key in self.gate.wake(self.now):
                self.scheduler.ready(fairness_key)
            if self.scheduler.deliver(most, self.fetch):
                continue
            wake_ns = self.gate.next_wake_ns()
            if wake_ns is None or wake_ns > until_ns:
                self.now = until_ns
                return
            self.now = max(self.now, wake_ns)

    def messages(self) -> list[str]:
        return [message for _, _, message in self.out]


def test_throttled_message_does_not_delay_later_ones() -> None:
    queue = Queue(buckets(x=(1, 1)))
    queue.put("a", "x1", "x")
    queue.put("a", "x2", "x")
    queue.put("a", "free")
    queue.put("a", "y1", "y")
    queue.put("a", "x3", "x")
    queue.run(T0 + 10 * S)
    assert queue.out == [
        (T0, "a", "x1"), (T0, "a", "free"), (T0, "a", "y1"), (T0 + S, "a", "x2"), (T0 + 2 * S, "a", "x3")
    ]  # fmt: skip
    assert len(queue.gate) == 0
    assert queue.gate.next_wake_ns() is None


def test_messages_of_a_throttle_key_keep_their_order() -> None:
    target = buckets(x=(1, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    assert target.try_take(("x",), T0) is None
    assert not gate.admit("a", "first", ("x",), T0)
    assert not gate.admit("a", "second", ("x",), T0 + S), "the available token belongs to the first message"
    assert gate.wake(T0 + S) == ["a"]
    assert gate.has_woken("a")
    assert gate.pop("a", T0 + S) == ("first", ("x",))
    assert gate.pop("a", T0 + S) is None
    assert gate.next_wake_ns() == T0 + 2 * S
    assert gate.parked("a") == ["second"]


def test_message_with_two_keys_waits_for_both_without_blocking_either() -> None:
    queue = Queue(buckets(x=(1, 1), y=(0.1, 1)))
    queue.put("a", "xy1", "x", "y")
    queue.put("a", "xy2", "x", "y")
    for number in range(5):
        queue.put("a", f"x{number}", "x")
    queue.run(T0 + 30 * S)
    assert queue.out[0] == (T0, "a", "xy1")
    assert [message for _, _, message in queue.out if message != "xy2"] == ["xy1", "x0", "x1", "x2", "x3", "x4"]
    assert (T0 + 10 * S, "a", "xy2") in queue.out


def test_message_that_waits_for_another_key_keeps_its_age_order() -> None:
    target = buckets(x=(1, 1), y=(0.5, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    target.try_take(("x",), T0)
    assert not gate.admit("a", "older", ("x", "y"), T0)
    target.try_take(("y",), T0)
    assert not gate.admit("a", "younger", ("y",), T0)
    assert gate.wake(T0 + S) == ["a"]
    assert gate.pop("a", T0 + S) is None
    assert gate.parked("a") == ["older", "younger"]
    assert gate.wake(T0 + 2 * S) == ["a"]
    assert gate.pop("a", T0 + 2 * S) == ("older", ("x", "y"))
    assert gate.wake(T0 + 4 * S) == ["a"]
    assert gate.pop("a", T0 + 4 * S) == ("younger", ("y",))
    assert (len(gate), gate.next_wake_ns()) == (0, None)


def test_pause_holds_messages_until_the_limit_changes() -> None:
    target = buckets(x=(0, 1))
    queue = Queue(target)
    queue.put("a", "paused", "x")
    queue.put("a", "free")
    queue.run(T0 + 3600 * S)
    assert queue.messages() == ["free"]
    assert queue.gate.next_wake_ns() is None, "no wake-up is scheduled"
    target.set_limit("x", Limit(5, 1), queue.now)
    queue.gate.limit_changed("x", queue.now)
    queue.gate.limit_changed("unheard of", queue.now)
    queue.run(queue.now + S)
    assert queue.messages() == ["free", "paused"]


def test_removed_limit_releases_all_messages() -> None:
    target = buckets(x=(0.001, 1))
    queue = Queue(target)
    for number in range(50):
        queue.put("ab"[number % 2], str(number), "x")
    queue.run(T0)
    assert len(queue.out) == 1
    target.remove_limit("x")
    queue.gate.limit_changed("x", queue.now)
    queue.run(queue.now)
    assert sorted(queue.messages(), key=int) == [str(number) for number in range(50)]
    for key in "ab":
        mine = [int(message) for _, fairness_key, message in queue.out if fairness_key == key]
        assert mine == sorted(mine)


def test_raised_limit_advances_the_wake_up() -> None:
    target = buckets(x=(0.001, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    assert target.try_take(("x",), T0) is None
    gate.admit("a", "m", ("x",), T0)
    assert gate.next_wake_ns() == T0 + 1000 * S
    target.set_limit("x", Limit(1, 1), T0)
    gate.limit_changed("x", T0)
    assert gate.next_wake_ns() == T0 + S
    target.set_limit("x", Limit(0.01, 1), T0)
    gate.limit_changed("x", T0)
    assert gate.next_wake_ns() == T0 + 100 * S


def test_tokens_are_distributed_round_robin_over_waiting_fairness_keys() -> None:
    queue = Queue(buckets(x=(10, 1)))
    for number in range(200):
        queue.put("greedy", f"g{number}", "x")
    queue.run(T0)
    for key in ("b", "c", "d"):
        for number in range(20):
            queue.put(key, f"{key}{number}", "x")
    queue.run(T0 + 8 * S)
    counts = Counter(fairness_key for _, fairness_key, _ in queue.out)
    assert max(counts.values()) - min(counts.values()) <= 2, counts
    assert queue.out[-1][0] <= T0 + 8 * S
    assert 80 <= len(queue.out) <= 82


def test_at_most_one_wake_up_per_token() -> None:
    target = buckets(x=(10, 3))
    gate: ThrottleGate[str] = ThrottleGate(target)
    assert taken(target, ("x",), T0) == 3
    for number in range(1000):
        assert not gate.admit(f"k{number}", f"m{number}", ("x",), T0)
    assert gate.wake(T0 + S // 10 - 1) == []
    assert gate.wake(T0 + S // 10) == ["k0"]
    assert gate.wake(T0 + S // 10) == []
    assert gate.wake(T0 + 100 * S) == ["k1", "k2"], "at most one wake-up per token before any lease"
    assert gate.next_wake_ns() is None, "the bucket is full: the next token comes after one was taken"
    assert gate.pop("k0", T0 + 100 * S) == ("m0", ("x",))
    assert gate.next_wake_ns() == T0 + 100 * S + S // 10
    assert gate.pop("k500", T0 + 100 * S) is None


def test_work_is_proportional_to_tokens() -> None:
    queue = Queue(buckets(x=(10, 1)))
    for number in range(5000):
        queue.put(f"k{number}", f"m{number}", "x")
    queue.run(T0)
    queue.fetches = 0
    queue.run(T0 + 10 * S)
    assert len(queue.out) == 101
    assert queue.fetches <= 250


def test_message_waits_again_if_another_queue_took_the_token() -> None:
    target = buckets(x=(1, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    target.try_take(("x",), T0)
    gate.admit("a", "a1", ("x",), T0)
    gate.admit("b", "b1", ("x",), T0)
    assert gate.wake(T0 + S) == ["a"]
    assert target.try_take(("x",), T0 + S) is None, "another queue took the token"
    assert gate.pop("a", T0 + S) is None
    assert gate.next_wake_ns() == T0 + 2 * S
    assert gate.wake(T0 + 2 * S) == ["a"], "the message keeps its position"
    assert gate.pop("a", T0 + 2 * S) == ("a1", ("x",))
    assert gate.wake(T0 + 3 * S) == ["b"]


def test_fairness_key_skips_a_bounded_number_of_messages() -> None:
    queue = Queue(buckets(x=(1, 1)), skip_max=10)
    for number in range(30):
        queue.put("a", f"x{number}", "x")
    queue.put("a", "free")
    queue.put("b", "other")
    queue.run(T0)
    assert queue.messages() == ["x0", "other"] or queue.messages() == ["other", "x0"]
    assert queue.gate.count("a") == 10
    queue.run(T0 + 100 * S)
    assert Counter(queue.messages()).most_common(1)[0][1] == 1
    assert len(queue.out) == 32
    when = {message: (at - T0) // S for at, _, message in queue.out}
    assert when["x29"] == 29
    assert when["free"] == 20, "as soon as it is within the limit"


def test_over_the_total_limit_each_fairness_key_parks_one_message() -> None:
    queue = Queue(buckets(x=(0, 1)), parked_max=20)
    for number in range(100):
        queue.put(f"k{number % 10}", f"m{number}", "x")
    for number in range(50):
        queue.put(f"late{number}", f"l{number}", "x")
        queue.put(f"late{number}", f"m{number}", "x")
    queue.run(T0)
    assert len(queue.gate) <= 20 + 60
    assert all(queue.gate.count(f"late{number}") >= 1 for number in range(50))


def test_messages_removed_elsewhere_are_forgotten_by_the_gate() -> None:
    target = buckets(x=(1, 1), y=(1, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    target.try_take(("x", "y"), T0)
    for name, key in (("m1", "x"), ("m2", "y"), ("m3", "x")):
        gate.admit("a", name, (key,), T0)
    gate.admit("b", "m4", ("x",), T0)
    assert gate.wake(T0 + S) == ["a"]
    assert gate.discard("a", lambda name: name == "m1", T0 + S) == ["m1"]
    assert gate.discard("a", lambda name: name == "m1", T0 + S) == []
    assert gate.pop("a", T0 + S) == ("m3", ("x",)), "the token is used by the next message of the key"
    assert gate.drop("a", T0 + S) == ["m2"]
    assert (gate.drop("a", T0 + S), gate.count("a"), gate.count("b"), len(gate)) == ([], 0, 1, 1)
    assert gate.wake(T0 + 2 * S) == ["b"]
    assert gate.drop("b", T0 + 2 * S) == ["m4"]
    assert gate.next_wake_ns() is None
    assert not gate._wait_lists
    assert not gate._heap


def test_dropped_woken_key_passes_its_token_to_the_next() -> None:
    target = buckets(x=(1, 1))
    gate: ThrottleGate[str] = ThrottleGate(target)
    target.try_take(("x",), T0)
    gate.admit("a", "a1", ("x",), T0)
    gate.admit("b", "b1", ("x",), T0)
    assert gate.wake(T0 + S) == ["a"]
    gate.drop("a", T0 + S)
    assert gate.next_wake_ns() == 0
    assert gate.wake(T0 + S) == ["b"]


def test_clock_set_back_delays_waiting_messages_by_at_most_one_interval() -> None:
    queue = Queue(buckets(x=(1, 1)))
    for number in range(5):
        queue.put("a", f"m{number}", "x")
    queue.run(T0 + S)
    assert len(queue.out) == 2
    queue.now = T0 - 3600 * S
    queue.run(queue.now + 4 * S)
    assert queue.messages() == [f"m{number}" for number in range(5)]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sets(st.sampled_from(["x", "y", "z", "free"]), max_size=3)), max_size=60
    ),
    st.tuples(st.integers(1, 5), st.integers(1, 3)),
    st.integers(1, 12),
    st.integers(1, 20),
)
def test_every_message_passes_exactly_once_within_the_limits(
    sent: list[tuple[str, set[str]]], rates: tuple[int, int], skip_max: int, most: int
) -> None:
    limits = {"x": (rates[0], 1), "y": (rates[1], 3), "z": (2, 2)}
    queue = Queue(buckets(**limits), skip_max=skip_max)
    for number, (fairness_key, keys) in enumerate(sent):
        queue.put(fairness_key, str(number), *sorted(keys))
    queue.run(T0 + 1000 * S, most)
    assert sorted(map(int, queue.messages())) == list(range(len(sent)))
    assert (len(queue.gate), queue.gate._wait_lists, queue.gate._counts) == (0, {}, {})
    for key, (rate, burst) in limits.items():
        times = [at for at, _, message in queue.out if key in sent[int(message)][1]]
        for number, at in enumerate(times):
            assert number + 1 <= burst + rate * (at - T0) / S + 1e-6
    for fairness_key in "abc":
        for wanted in ({"x"}, {"y"}, {"x", "y"}, {"free"}, set()):
            mine = [int(m) for _, key, m in queue.out if key == fairness_key and sent[int(m)][1] == wanted]
            assert mine == sorted(mine), "messages with the same keys keep their order"
