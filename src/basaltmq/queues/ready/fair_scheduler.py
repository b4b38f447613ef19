"""Whose turn it is: deficit round robin over fairness keys with weights (SPEC C10).

The scheduler knows keys, weights and which keys have something to deliver. Messages, counts and throttling are the
queue's: it says when a key becomes ready, empty or blocked, and asks for turns.

Algorithm
    Plain deficit round robin gives a key of weight w a run of w messages per round: with weights up to 2^32 that is
    either a run of billions, or rounds in which most keys are visited for nothing. So keys are put into classes by the
    power of two of their weight, class c holding weights 2^c .. 2^(c+1) - 1, at most 32 classes:

        class 0   ring: key key key ...     weight 1            sum of ready weights, pass
        class 3   ring: key key ...         weights 8 .. 15     sum of ready weights, pass
        ...

    Between classes: stride scheduling. Each message moves the class's pass forward by SCALE / (sum of its ready
    weights); the class with the least pass is served (the lower class on a tie). When the sum changes, what the class
    is ahead or behind of the virtual time is scaled with it, so that a class that grows does not wait for a debt it
    made while small.
    Inside a class: deficit round robin. For each round a key of weight w gets a deficit of w; a message costs 2^c. So
    each visit serves one or two messages, the remainder is kept, and a round gives each key exactly its weight.

    The quantum multiplies the deficits, not the costs: with a quantum of 8 a visit serves 8 to 16 messages of a key in
    a row. That is for queues whose keys are expensive to change (each a seek on disk): shares stay exact, but only over
    spans that are longer by that factor.

    Every step touches one key and at most 32 classes: O(1) for any number of keys. Rings are linked lists through the
    entries, so that a key leaves from anywhere in O(1) and leaves nothing behind.

Invariants
    - With an unchanged set of ready keys, a key's deliveries differ from its exact share by a few messages (times the
      quantum) at any moment, not by a few per cent: within 1 % as soon as a key had a few hundred of them.
    - No starvation: a ready key is served within about (sum of weights / its weight) * 3 * quantum deliveries. A change
      of weight cannot put it off: raising moves it to a faster class at once, lowering waits for its next turn.
    - Deterministic: the same calls give the same turns. Pure integers, no clock, no randomness.
    - An idle key is forgotten: memory follows the keys that are ready or blocked.

What is taken and not used is given back (`give_back`), so that a turn a key could not use is not held against it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from basaltmq.errors import InvalidArgumentError

WEIGHT_MAX: Final = (1 << 32) - 1
"""What the message row holds."""

QUANTUM_MAX: Final = 1024
"""A turn longer than the usual batch gains nothing."""

_SCALE: Final = 1 << 80
"""SCALE / sum of weights keeps 16 bits of precision with a million keys of the largest weight (2^52)."""


class _Entry:
    """A key the scheduler knows: linked into its class's ring when ready, alone when blocked."""

    __slots__ = ("behind", "deficit", "group", "in_front", "key", "weight", "weight_wanted")

    def __init__(self, key: str, weight: int, group: _Group) -> None:
        self.key = key
        self.weight = weight
        self.weight_wanted = weight
        self.deficit = 0
        self.group = group
        self.in_front: _Entry | None = None
        self.behind: _Entry | None = None


class _Group:
    """A weight class: the ring of its ready keys, the head being the one whose turn it is."""

    __slots__ = ("cost", "head", "pass_", "stride", "weights")

    def __init__(self, number: int) -> None:
        self.cost = 1 << number
        self.head: _Entry | None = None
        self.weights = 0
        self.pass_ = 0
        self.stride = 0


class FairScheduler:
    """Gives out turns. Not thread-safe: the caller holds its plane's lock."""

    def __init__(self, quantum: int = 1) -> None:
        if type(quantum) is not int or not 1 <= quantum <= QUANTUM_MAX:
            raise InvalidArgumentError(f"the quantum of a scheduler is 1 to {QUANTUM_MAX}, not {quantum!r:.80}")
        self._quantum = quantum
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[int, _Group] = {}
        self._active: list[_Group] = []
        self._time = 0
        self._ready_count = 0

    def set_quantum(self, quantum: int) -> None:
        """Serve keys in longer or shorter runs, each from its next round on."""
        assert 1 <= quantum <= QUANTUM_MAX, f"a quantum of {quantum}"
        self._quantum = quantum

    def __len__(self) -> int:
        """Keys known: ready or blocked."""
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def ready_count(self) -> int:
        return self._ready_count

    def is_ready(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.in_front is not None

    def weight(self, key: str) -> int | None:
        """The weight asked for last, None for a key that is not known."""
        entry = self._entries.get(key)
        return None if entry is None else entry.weight_wanted

    def deficit(self, key: str) -> int:
        """What the key has left of its round, in units of weight; 0 for a key that is not known."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.deficit

    def ready(self, key: str, weight: int | None = None) -> None:
        """The key has something to deliver. With `weight` as `set_weight`; a key not known gets 1 without."""
        entry = self._entries.get(key)
        if entry is None:
            wanted = 1 if weight is None else _checked(weight)
            entry = self._entries[key] = _Entry(key, wanted, self._group(wanted))
            self._link(entry)
            return
        if weight is not None and weight != entry.weight_wanted:
            self._reweigh(entry, _checked(weight))
        if entry.in_front is None:
            self._link(entry)

    def block(self, key: str) -> None:
        """The key has something, but none of it may go before `ready` is called for it."""
        entry = self._entries.get(key)
        if entry is not None and entry.in_front is not None:
            self._unlink(entry)

    def idle(self, key: str) -> None:
        """The key has nothing left; it is forgotten, its weight included."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.in_front is not None:
            self._unlink(entry)

    def clear(self) -> None:
        """No key has anything left."""
        for entry in self._entries.values():
            # Rings would keep each other alive.
            entry.in_front = entry.behind = None
        self._entries.clear()
        for group in self._active:
            group.head, group.weights, group.stride = None, 0, 0
        self._active.clear()
        self._ready_count = 0

    def set_weight(self, key: str, weight: int) -> None:
        """Change a known key's weight, ready or blocked. A key not known is ignored: it has nothing to weigh."""
        wanted = _checked(weight)
        entry = self._entries.get(key)
        if entry is not None and wanted != entry.weight_wanted:
            self._reweigh(entry, wanted)

    def take(self, count: int) -> list[tuple[str, int]]:
        """The next `count` turns as (key, how many), each key once, in the order of their first turn.

        The turns count as used. What a key cannot use goes back with `give_back`; a key found empty is made `idle`.
        Empty when no key is ready.
        """
        turns: dict[str, int] = {}
        active = self._active
        while count > 0 and active:
            group = active[0]
            for other in active:
                if other.pass_ < group.pass_:
                    group = other
            entry = group.head
            assert entry is not None
            cost = group.cost
            if len(active) == 1:
                # Alone, a class may be served without looking at the others between two messages.
                count = self._take_alone(group, count, turns)
                continue
            self._time = group.pass_
            group.pass_ += group.stride
            entry.deficit -= cost
            turns[entry.key] = turns.get(entry.key, 0) + 1
            count -= 1
            if entry.deficit < cost:
                entry.deficit += entry.weight * self._quantum
                group.head = entry.behind
                if entry.weight_wanted != entry.weight:
                    self._apply_weight(entry)
        return list(turns.items())

    def upcoming(self, count: int) -> list[tuple[str, int]]:
        """Keys whose turns come next and how much they may take then, up to `count` of each class."""
        found: list[tuple[str, int]] = []
        for group in self._active:
            entry = group.head
            if entry is None:
                continue
            for _ in range(count):
                found.append((entry.key, entry.deficit // group.cost))
                assert entry.behind is not None, "a key in a ring is linked"
                entry = entry.behind
                if entry is group.head:
                    break
        return found

    def give_back(self, key: str, count: int) -> None:
        """Undo `count` of the turns the last `take` gave to a key: it is as far ahead in line as before."""
        if count < 0:
            raise InvalidArgumentError(f"turns given back are 0 or more, not {count}")
        entry = self._entries.get(key)
        if entry is None or entry.in_front is None:
            # A key that is gone or blocked comes back behind the others, without savings.
            return
        group = entry.group
        entry.deficit += count * group.cost
        group.pass_ -= count * group.stride
        if group.pass_ < self._time:
            self._time = group.pass_

    def deliver(
        self,
        count: int,
        fetch: Callable[[str, int], tuple[int, bool]],
        prepare: Callable[[list[tuple[str, int]]], None] | None = None,
    ) -> int:
        """Give turns until `count` messages were fetched or no key is ready; how many were fetched.

        `fetch(key, most)` fetches up to `most` messages of a key, and says how many it got and whether the key has more
        to deliver right away. When it has not, the key is made idle, unless `fetch` itself called `block` for it.
        `prepare` is told of turns before the first of them is fetched.
        """
        left = count
        entries = self._entries
        while left > 0:
            turns = self.take(left)
            if not turns:
                break
            at = 0
            lighter: dict[_Group, int] = {}
            try:
                if prepare is not None:
                    prepare(turns)
                for key, most in turns:
                    got, more = fetch(key, most)
                    at += 1
                    assert 0 <= got <= most
                    assert got or not more, "a key that has more gives some of it"
                    left -= got
                    if not more:
                        entry = entries.get(key)
                        if entry is not None and entry.in_front is not None:
                            del entries[key]
                            self._detach(entry)
                            group = entry.group
                            lighter[group] = lighter.get(group, 0) - entry.weight
                    elif got < most:
                        self.give_back(key, most - got)
            except BaseException:
                for key, most in turns[at:]:
                    self.give_back(key, most)
                raise
            finally:
                # A class is weighed once for all the keys that left it.
                for group, change in lighter.items():
                    self._weigh(group, change)
        return count - left

    def _take_alone(self, group: _Group, count: int, turns: dict[str, int]) -> int:
        cost = group.cost
        wanted = count
        stride = group.stride
        changed: _Entry | None = None
        while count > 0:
            entry = group.head
            assert entry is not None
            deficit = entry.deficit
            run = deficit // cost
            if run > count:
                run = count
            deficit -= run * cost
            turns[entry.key] = turns.get(entry.key, 0) + run
            count -= run
            if deficit < cost:
                entry.deficit = deficit + entry.weight * self._quantum
                group.head = entry.behind
                if entry.weight_wanted != entry.weight:
                    changed = entry
                    break
            else:
                entry.deficit = deficit
        group.pass_ += (wanted - count) * stride
        self._time = group.pass_ - stride
        if changed is not None:
            self._apply_weight(changed)
        return count

    def _group(self, weight: int) -> _Group:
        number = weight.bit_length() - 1
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = _Group(number)
        return group

    def _link(self, entry: _Entry) -> None:
        """Put a key behind all others of its class."""
        if entry.weight_wanted != entry.weight:
            entry.weight = entry.weight_wanted
            entry.group = self._group(entry.weight)
        entry.deficit = entry.weight * self._quantum
        group = entry.group
        head = group.head
        if head is None:
            entry.in_front = entry.behind = entry
            group.head = entry
        else:
            last = head.in_front
            assert last is not None
            entry.in_front, entry.behind = last, head
            last.behind = head.in_front = entry
        self._weigh(group, entry.weight)
        self._ready_count += 1

    def _unlink(self, entry: _Entry) -> None:
        self._detach(entry)
        self._weigh(entry.group, -entry.weight)

    def _detach(self, entry: _Entry) -> None:
        """Take a key out of its ring; the class is to be weighed without it."""
        group = entry.group
        before, behind = entry.in_front, entry.behind
        assert before is not None
        assert behind is not None
        if behind is entry:
            group.head = None
        else:
            before.behind, behind.in_front = behind, before
            if group.head is entry:
                group.head = behind
        entry.in_front = entry.behind = None
        self._ready_count -= 1

    def _weigh(self, group: _Group, change: int) -> None:
        """Change the sum of a class's ready weights and keep its place in line in proportion."""
        before = group.weights
        after = group.weights = before + change
        if before == 0:
            self._active.append(group)
            self._active.sort(key=lambda active: active.cost)
            group.stride = _SCALE // after
            group.pass_ = self._time + group.stride
        elif after == 0:
            self._active.remove(group)
            group.stride = 0
        else:
            ahead = group.pass_ - self._time
            stride = _SCALE // after
            # One message ahead is one message ahead afterwards; the usual case, at a third of the cost.
            group.pass_ = self._time + (stride if ahead == group.stride else ahead * before // after)
            group.stride = stride

    def _reweigh(self, entry: _Entry, wanted: int) -> None:
        """Raise at once, lower at the key's next turn: a weight that goes up and down never puts a key off."""
        entry.weight_wanted = wanted
        if entry.in_front is not None and wanted > entry.weight:
            self._apply_weight(entry)

    def _apply_weight(self, entry: _Entry) -> None:
        wanted = entry.weight_wanted
        if wanted.bit_length() == entry.weight.bit_length():
            self._weigh(entry.group, wanted - entry.weight)
            entry.weight = wanted
        else:
            self._unlink(entry)
            self._link(entry)


def _checked(weight: int) -> int:
    if type(weight) is not int or not 1 <= weight <= WEIGHT_MAX:
        raise InvalidArgumentError(f"the weight of a fairness key is 1 to {WEIGHT_MAX}, not {weight!r:.80}")
    return weight
