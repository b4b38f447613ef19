"""Parks messages that wait for tokens, and decides which are woken when tokens arrive (SPEC C11).

The first message of a fairness key may wait for a token while later ones need none. The gate lets a queue skip such
messages: it holds ("parks") them and says when to retry. For a fairness key that has its turn, the queue runs:

    while it wants more:
        message = gate.pop(key, now)                     parked before, tokens available now: delivered first
        if none and gate.can_fetch(key):
            message = the key's next one
            if not gate.admit(key, message, message's throttle keys, now): continue     parked
        if none: scheduler.block(key); break             (or idle, if nothing is left or parked)
        deliver it

The queue calls `wake(now)` before each round of deliveries and at `next_wake_ns()`, and makes the returned keys ready
again. There is no polling: no message is tried before its token is available.

Order: messages of one fairness key that wait for the same throttle key keep their order. A message waits behind another
only if it needs the throttle key that the other waits for. Messages with other throttle keys, or none, are not delayed.

Fairness: each fairness key has one slot in the wait list of a throttle key, however many messages it has parked. So
tokens go round robin over fairness keys. Only as many keys are woken as there are tokens (no thundering herd). A woken
message that lacks another key's token goes to the front of that key's wait list.

Bounds: `skip_max` parked messages per fairness key; above that its turn ends until one is delivered. `parked_max` in
total; above that each fairness key may park one. The caller chooses what is parked as the message (a key or a handle),
which determines the memory use.

Known limit: a message may need two keys that single-key messages saturate. It may find one token gone whenever the
other arrives. It gets another chance with every token, but its wait has no upper bound.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from basaltmq.queues.throttle.token_buckets import TokenBuckets

SKIP_MAX: Final = 128
"""Messages of a fairness key skipped to find one that can be delivered. More would be a scan."""

PARKED_MAX: Final = 100_000

M = TypeVar("M")


class _Parked(NamedTuple, Generic[M]):
    order: int
    message: M
    keys: tuple[str, ...]


class _WaitList:
    """Fairness keys that wait for a throttle key, and those woken that have not tried yet."""

    __slots__ = ("due_ns", "waiting", "woken")

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, None] = OrderedDict()
        self.woken: dict[str, None] = {}
        self.due_ns: int | None = None


class ThrottleGate(Generic[M]):
    """The parked messages of one queue. Not thread-safe: the caller holds its plane's lock."""

    def __init__(self, buckets: TokenBuckets, *, skip_max: int = SKIP_MAX, parked_max: int = PARKED_MAX) -> None:
        assert skip_max >= 1
        self._buckets = buckets
        self._skip_max = skip_max
        self._parked_max = parked_max
        self._parked: dict[str, dict[str, deque[_Parked[M]]]] = {}
        self._counts: dict[str, int] = {}
        self._wait_lists: dict[str, _WaitList] = {}
        self._heap: list[tuple[int, str]] = []
        self._woken: dict[str, None] = {}
        self._clock_ns = 0
        self._order = 0
        self._total = 0

    def __len__(self) -> int:
        """Number of parked messages."""
        return self._total

    def count(self, fairness_key: str) -> int:
        return self._counts.get(fairness_key, 0)

    def can_fetch(self, fairness_key: str) -> bool:
        """Whether the queue may fetch another message of this fairness key."""
        held = self._counts.get(fairness_key, 0)
        return held == 0 or (held < self._skip_max and self._total < self._parked_max)

    def has_woken(self, fairness_key: str) -> bool:
        """Whether a parked message of this fairness key was woken for a token."""
        groups = self._parked.get(fairness_key)
        return groups is not None and any(fairness_key in self._wait_lists[key].woken for key in groups)

    def admit(self, fairness_key: str, message: M, keys: tuple[str, ...], now_ns: int) -> bool:
        """Take the message's tokens and return True, or park it and return False."""
        groups = self._parked.get(fairness_key)
        if groups:
            for key in keys:
                if key in groups:
                    self._park(fairness_key, key, message, keys, now_ns)
                    return False
        blocked = self._buckets.try_take(keys, now_ns)
        if blocked is None:
            return True
        self._park(fairness_key, blocked.key, message, keys, now_ns)
        return False

    def pop(
        self, fairness_key: str, now_ns: int, fits: Callable[[M], bool] | None = None
    ) -> tuple[M, tuple[str, ...]] | None:
        """Take the tokens of the next deliverable parked message, and return it with its throttle keys. A message that
        does not fit stays parked and woken."""
        groups = self._parked.get(fairness_key)
        if not groups:
            return None
        for key in list(groups):
            wait_list = self._wait_lists[key]
            while fairness_key in wait_list.woken:
                first = groups[key][0]
                if fits is not None and not fits(first.message):
                    return None
                del wait_list.woken[fairness_key]
                blocked = self._buckets.try_take(first.keys, now_ns)
                if blocked is None:
                    self._remove_first(fairness_key, key, now_ns)
                    return first.message, first.keys
                if blocked.key == key:
                    wait_list.waiting[fairness_key] = None
                    wait_list.waiting.move_to_end(fairness_key, last=False)
                    self._wake_waiting(key, now_ns)
                    break
                self._move_first(fairness_key, key, blocked.key, now_ns)
                if key not in groups:
                    break
        return None

    def wake(self, now_ns: int) -> list[str]:
        """Return the fairness keys woken since the last call, in the order of their tokens."""
        if now_ns < self._clock_ns:
            self._clock_set_back(now_ns)
        self._clock_ns = now_ns
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, key = heapq.heappop(self._heap)
            wait_list = self._wait_lists.get(key)
            if wait_list is not None and wait_list.due_ns == due_ns:
                wait_list.due_ns = None
                self._wake_waiting(key, now_ns)
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def stay_awake(self, fairness_key: str) -> None:
        """Make `wake` return the key again if it still has a woken message."""
        if self.has_woken(fairness_key):
            self._woken[fairness_key] = None

    def next_wake_ns(self) -> int | None:
        """Return when to call `wake` next: 0 if keys are already woken, None if nothing is due until something
        changes."""
        if self._woken:
            return 0
        while self._heap:
            due_ns, key = self._heap[0]
            wait_list = self._wait_lists.get(key)
            if wait_list is not None and wait_list.due_ns == due_ns:
                return due_ns
            heapq.heappop(self._heap)
        return None

    def limit_changed(self, key: str, now_ns: int) -> None:
        """Re-evaluate the wait list of a throttle key whose limit was set or removed."""
        if key in self._wait_lists:
            self._wake_waiting(key, now_ns)

    def discard(self, fairness_key: str, is_it: Callable[[M], bool], now_ns: int) -> list[M]:
        """Remove and return the parked messages of a fairness key that match `is_it`."""
        gone: list[M] = []
        groups = self._parked.get(fairness_key, {})
        for key in list(groups):
            group = groups[key]
            kept = deque(item for item in group if not is_it(item.message))
            if len(kept) == len(group):
                continue
            gone += (item.message for item in group if is_it(item.message))
            self._recount(fairness_key, len(kept) - len(group))
            groups[key] = kept
            if not kept:
                self._close_group(fairness_key, key, now_ns)
        return gone

    def drop(self, fairness_key: str, now_ns: int) -> list[M]:
        """Remove and return all parked messages of a fairness key, in order."""
        messages = self.parked(fairness_key)
        self.discard(fairness_key, lambda message: True, now_ns)
        return messages

    def parked(self, fairness_key: str) -> list[M]:
        """Return the parked messages of a fairness key, in order."""
        groups = self._parked.get(fairness_key, {})
        items = sorted((item for group in groups.values() for item in group), key=lambda item: item.order)
        return [item.message for item in items]

    def _clock_set_back(self, now_ns: int) -> None:
        """Recompute all wake times, because they are in the caller's clock."""
        self._heap.clear()
        for key, wait_list in list(self._wait_lists.items()):
            wait_list.due_ns = None
            self._wake_waiting(key, now_ns)

    def _park(self, fairness_key: str, key: str, message: M, keys: tuple[str, ...], now_ns: int) -> None:
        self._order += 1
        groups = self._parked.setdefault(fairness_key, {})
        group = groups.get(key)
        self._recount(fairness_key, 1)
        if group is None:
            groups[key] = deque([_Parked(self._order, message, keys)])
            self._wait(fairness_key, key, now_ns, last=True)
        else:
            group.append(_Parked(self._order, message, keys))

    def _wait(self, fairness_key: str, key: str, now_ns: int, *, last: bool) -> None:
        wait_list = self._wait_lists.get(key)
        if wait_list is None:
            wait_list = self._wait_lists[key] = _WaitList()
        wait_list.waiting[fairness_key] = None
        if not last:
            wait_list.waiting.move_to_end(fairness_key, last=False)
        self._wake_waiting(key, now_ns)

    def _remove_first(self, fairness_key: str, key: str, now_ns: int) -> None:
        """Remove the first message of a group. The fairness key waits again for the next one."""
        group = self._parked[fairness_key][key]
        group.popleft()
        self._recount(fairness_key, -1)
        if group:
            self._wait_lists[key].waiting[fairness_key] = None
            self._wake_waiting(key, now_ns)
        else:
            self._close_group(fairness_key, key, now_ns)

    def _move_first(self, fairness_key: str, key: str, to: str, now_ns: int) -> None:
        """Move the first message of a group to the wait list of another key that blocks it, ordered by age."""
        groups = self._parked[fairness_key]
        item = groups[key].popleft()
        target = groups.get(to)
        if target is None:
            groups[to] = deque([item])
        else:
            at = next((at for at, other in enumerate(target) if other.order > item.order), len(target))
            target.insert(at, item)
        if groups[key]:
            # The token that woke this message is still available for the next one of the group.
            self._wait_lists[key].waiting[fairness_key] = None
            self._wait_lists[key].waiting.move_to_end(fairness_key, last=False)
            self._wake_waiting(key, now_ns)
        else:
            self._close_group(fairness_key, key, now_ns)
        if target is None:
            self._wait(fairness_key, to, now_ns, last=False)

    def _close_group(self, fairness_key: str, key: str, now_ns: int) -> None:
        groups = self._parked[fairness_key]
        del groups[key]
        if not groups:
            del self._parked[fairness_key]
        wait_list = self._wait_lists[key]
        wait_list.waiting.pop(fairness_key, None)
        wait_list.woken.pop(fairness_key, None)
        self._wake_waiting(key, now_ns)

    def _wake_waiting(self, key: str, now_ns: int) -> None:
        """Wake one fairness key per unassigned token, and compute when the next token arrives."""
        wait_list = self._wait_lists[key]
        if not wait_list.waiting:
            wait_list.due_ns = None
            if not wait_list.woken:
                del self._wait_lists[key]
            return
        spare = self._buckets.available(key, now_ns) - len(wait_list.woken)
        while spare > 0 and wait_list.waiting:
            fairness_key, _ = wait_list.waiting.popitem(last=False)
            wait_list.woken[fairness_key] = None
            self._woken[fairness_key] = None
            spare -= 1
        due_ns = None
        if wait_list.waiting:
            due_ns = self._buckets.available_at(key, len(wait_list.woken) + 1, now_ns)
        if due_ns is not None and due_ns != wait_list.due_ns:
            heapq.heappush(self._heap, (due_ns, key))
        wait_list.due_ns = due_ns
        if len(self._heap) > 2 * len(self._wait_lists) + 64:
            self._heap = [
                (wait_list.due_ns, key) for key, wait_list in self._wait_lists.items() if wait_list.due_ns is not None
            ]
            heapq.heapify(self._heap)

    def _recount(self, fairness_key: str, change: int) -> None:
        self._total += change
        count = self._counts.get(fairness_key, 0) + change
        if count:
            self._counts[fairness_key] = count
        else:
            self._counts.pop(fairness_key, None)
