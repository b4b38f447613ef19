"""What waits for tokens, and who is woken when they come (SPEC C11).

The head of a fairness key may wait for a token while the messages behind it need none. The gate lets a queue step over
such messages: it holds them ("parked") and says when to come back. The queue does this for a fairness key that has its
turn:

    while it wants more:
        message = gate.pop(key, now)                     parked before, its tokens are there: goes first
        if none and gate.can_fetch(key):
            message = the key's next one
            if not gate.admit(key, message, message's throttle keys, now): continue     parked
        if none: scheduler.block(key); break             (or idle, when nothing is left nor parked)
        deliver it

and makes ready again the keys that `wake(now)` names, which is called before each round of deliveries and at
`next_wake_ns()`. There is no polling: nothing is looked at before its token is there.

Order: messages of one fairness key that wait for the same throttle key go in their order. A message only waits behind
another when it needs the key that one waits for, so messages with other throttle keys, or none, are not held up.

Who gets a token that many wait for: each fairness key waits once in the line of a throttle key, however many messages
it has parked, so tokens go round robin over fairness keys; only as many are woken as there are tokens (no stampede). A
message that lacks another key's token when woken goes to the front of that key's line.

Bounds: `skip_max` parked messages per fairness key (beyond, its turn ends until one of them goes) and `parked_max` in
all, above which each fairness key holds one. Memory is what the caller hands in as the message, a key or a handle.

Known limit: a message that needs two keys, both of them saturated by messages that need just one of the two, may find
one token gone each time the other comes. Its chance returns with every token; there is no bound on the wait.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from basaltmq.queues.throttle.token_buckets import TokenBuckets

SKIP_MAX: Final = 128
"""Messages of a fairness key looked past for one that may go; more is a scan, not a step aside."""

PARKED_MAX: Final = 100_000

M = TypeVar("M")


class _Waiting(NamedTuple, Generic[M]):
    order: int
    message: M
    keys: tuple[str, ...]


class _Line:
    """Who waits for a throttle key: fairness keys in line, and those woken that did not try yet."""

    __slots__ = ("due_ns", "waiting", "woken")

    def __init__(self) -> None:
        self.waiting: OrderedDict[str, None] = OrderedDict()
        self.woken: dict[str, None] = {}
        self.due_ns: int | None = None


class ThrottleGate(Generic[M]):
    """Parked messages of one queue. Not thread-safe: the caller holds its plane's lock."""

    def __init__(self, buckets: TokenBuckets, *, skip_max: int = SKIP_MAX, parked_max: int = PARKED_MAX) -> None:
        assert skip_max >= 1
        self._buckets = buckets
        self._skip_max = skip_max
        self._parked_max = parked_max
        self._parked: dict[str, dict[str, deque[_Waiting[M]]]] = {}
        self._counts: dict[str, int] = {}
        self._lines: dict[str, _Line] = {}
        self._heap: list[tuple[int, str]] = []
        self._woken: dict[str, None] = {}
        self._clock_ns = 0
        self._order = 0
        self._total = 0

    def __len__(self) -> int:
        """Messages parked."""
        return self._total

    def count(self, fairness_key: str) -> int:
        return self._counts.get(fairness_key, 0)

    def can_fetch(self, fairness_key: str) -> bool:
        """Whether the queue may look at a further message of this fairness key."""
        held = self._counts.get(fairness_key, 0)
        return held == 0 or (held < self._skip_max and self._total < self._parked_max)

    def has_woken(self, fairness_key: str) -> bool:
        """Whether a parked message of this fairness key has a token waiting for it."""
        groups = self._parked.get(fairness_key)
        return groups is not None and any(fairness_key in self._lines[key].woken for key in groups)

    def admit(self, fairness_key: str, message: M, keys: tuple[str, ...], now_ns: int) -> bool:
        """True: its tokens are taken, deliver it. False: it is parked, the gate has it."""
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
        """The next parked message that can go, with its throttle keys; its tokens are taken. One that does not fit
        stays, and so does what woke it."""
        groups = self._parked.get(fairness_key)
        if not groups:
            return None
        for key in list(groups):
            line = self._lines[key]
            while fairness_key in line.woken:
                first = groups[key][0]
                if fits is not None and not fits(first.message):
                    return None
                del line.woken[fairness_key]
                blocked = self._buckets.try_take(first.keys, now_ns)
                if blocked is None:
                    self._leave(fairness_key, key, now_ns)
                    return first.message, first.keys
                if blocked.key == key:
                    line.waiting[fairness_key] = None
                    line.waiting.move_to_end(fairness_key, last=False)
                    self._wake_line(key, now_ns)
                    break
                self._move(fairness_key, key, blocked.key, now_ns)
                if key not in groups:
                    break
        return None

    def wake(self, now_ns: int) -> list[str]:
        """Fairness keys that have a parked message to try again since the last call, in the order of their tokens."""
        if now_ns < self._clock_ns:
            self._clock_set_back(now_ns)
        self._clock_ns = now_ns
        while self._heap and self._heap[0][0] <= now_ns:
            due_ns, key = heapq.heappop(self._heap)
            line = self._lines.get(key)
            if line is not None and line.due_ns == due_ns:
                line.due_ns = None
                self._wake_line(key, now_ns)
        woken = list(self._woken)
        self._woken.clear()
        return woken

    def stay_awake(self, fairness_key: str) -> None:
        """`wake` named the key, but not everything that has a token was taken: it is named again."""
        if self.has_woken(fairness_key):
            self._woken[fairness_key] = None

    def next_wake_ns(self) -> int | None:
        """When to call `wake` next; in the past when it has something to tell. None: not before something changes."""
        if self._woken:
            return 0
        while self._heap:
            due_ns, key = self._heap[0]
            line = self._lines.get(key)
            if line is not None and line.due_ns == due_ns:
                return due_ns
            heapq.heappop(self._heap)
        return None

    def limit_changed(self, key: str, now_ns: int) -> None:
        """A throttle key's limit was set or removed: those in its line are looked at again."""
        if key in self._lines:
            self._wake_line(key, now_ns)

    def discard(self, fairness_key: str, is_it: Callable[[M], bool], now_ns: int) -> list[M]:
        """Forget the parked messages of a fairness key that went another way (expired, deleted); the messages."""
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
        """Hand back all parked messages of a fairness key, in their order."""
        messages = self.parked(fairness_key)
        self.discard(fairness_key, lambda message: True, now_ns)
        return messages

    def parked(self, fairness_key: str) -> list[M]:
        """The parked messages of a fairness key, in their order."""
        groups = self._parked.get(fairness_key, {})
        items = sorted((item for group in groups.values() for item in group), key=lambda item: item.order)
        return [item.message for item in items]

    def _clock_set_back(self, now_ns: int) -> None:
        """All times are told in the caller's clock, so they are worked out again."""
        self._heap.clear()
        for key, line in list(self._lines.items()):
            line.due_ns = None
            self._wake_line(key, now_ns)

    def _park(self, fairness_key: str, key: str, message: M, keys: tuple[str, ...], now_ns: int) -> None:
        self._order += 1
        groups = self._parked.setdefault(fairness_key, {})
        group = groups.get(key)
        self._recount(fairness_key, 1)
        if group is None:
            groups[key] = deque([_Waiting(self._order, message, keys)])
            self._queue_up(fairness_key, key, now_ns, last=True)
        else:
            group.append(_Waiting(self._order, message, keys))

    def _queue_up(self, fairness_key: str, key: str, now_ns: int, *, last: bool) -> None:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
        line.waiting[fairness_key] = None
        if not last:
            line.waiting.move_to_end(fairness_key, last=False)
        self._wake_line(key, now_ns)

    def _leave(self, fairness_key: str, key: str, now_ns: int) -> None:
        """The first message of a group went; the fairness key lines up again for the next one."""
        group = self._parked[fairness_key][key]
        group.popleft()
        self._recount(fairness_key, -1)
        if group:
            self._lines[key].waiting[fairness_key] = None
            self._wake_line(key, now_ns)
        else:
            self._close_group(fairness_key, key, now_ns)

    def _move(self, fairness_key: str, key: str, to: str, now_ns: int) -> None:
        """The first message of a group has this key's token, but waits for another key: it waits there, by its age."""
        groups = self._parked[fairness_key]
        item = groups[key].popleft()
        target = groups.get(to)
        if target is None:
            groups[to] = deque([item])
        else:
            at = next((at for at, other in enumerate(target) if other.order > item.order), len(target))
            target.insert(at, item)
        if groups[key]:
            # The token that woke this one is still there for the next of the group.
            self._lines[key].waiting[fairness_key] = None
            self._lines[key].waiting.move_to_end(fairness_key, last=False)
            self._wake_line(key, now_ns)
        else:
            self._close_group(fairness_key, key, now_ns)
        if target is None:
            self._queue_up(fairness_key, to, now_ns, last=False)

    def _close_group(self, fairness_key: str, key: str, now_ns: int) -> None:
        groups = self._parked[fairness_key]
        del groups[key]
        if not groups:
            del self._parked[fairness_key]
        line = self._lines[key]
        line.waiting.pop(fairness_key, None)
        line.woken.pop(fairness_key, None)
        self._wake_line(key, now_ns)

    def _wake_line(self, key: str, now_ns: int) -> None:
        """Wake as many as there are tokens that nobody was woken for, and set the time of the next."""
        line = self._lines[key]
        if not line.waiting:
            line.due_ns = None
            if not line.woken:
                del self._lines[key]
            return
        spare = self._buckets.available(key, now_ns) - len(line.woken)
        while spare > 0 and line.waiting:
            fairness_key, _ = line.waiting.popitem(last=False)
            line.woken[fairness_key] = None
            self._woken[fairness_key] = None
            spare -= 1
        due_ns = None
        if line.waiting:
            due_ns = self._buckets.available_at(key, len(line.woken) + 1, now_ns)
        if due_ns is not None and due_ns != line.due_ns:
            heapq.heappush(self._heap, (due_ns, key))
        line.due_ns = due_ns
        if len(self._heap) > 2 * len(self._lines) + 64:
            self._heap = [(line.due_ns, key) for key, line in self._lines.items() if line.due_ns is not None]
            heapq.heapify(self._heap)

    def _recount(self, fairness_key: str, change: int) -> None:
        self._total += change
        count = self._counts.get(fairness_key, 0) + change
        if count:
            self._counts[fairness_key] = count
        else:
            self._counts.pop(fairness_key, None)
