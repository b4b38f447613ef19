"""Deficit round robin over weighted fairness keys: picks the key with the next turn (SPEC C10).

The scheduler knows keys, weights and which keys have messages. The queue manages messages, counts and throttling: it
reports when a key becomes ready, idle or blocked, and takes turns.

Algorithm
    Plain deficit round robin gives a key of weight w a run of w messages per round. With weights up to 2^32 that means
    runs of billions, or rounds that visit most keys without a delivery. So keys are in classes by the power of two
    of their weight. Class c holds weights 2^c .. 2^(c+1) - 1; there are at most 32 classes:

        class 0   ring: key key key ...     weight 1            sum of ready weights, pass
        class 3   ring: key key ...         weights 8 .. 15     sum of ready weights, pass
        ...

    Between classes: stride scheduling. Each message advances the class's pass by SCALE / (sum of its ready weights).
    The class with the lowest pass is served, the lower class on a tie. When the sum changes, the distance of the pass
    from the virtual time is scaled with it. So a class that grows does not wait for a debt from when it was small.
    Inside a class: deficit round robin. In each round a key of weight w gets a deficit of w; a message costs 2^c. So
    each visit serves one or two messages, the remainder is kept, and a round gives each key exactly its weight.

    The quantum multiplies the deficits, not the costs: with a quantum of 8, a visit serves 8 to 16 messages of a key in
    a row. That is for queues where changing keys is expensive (a disk seek each). Shares stay exact, over spans that
    are longer by that factor.

    Every step touches one key and at most 32 classes: O(1) for any number of keys. Rings are linked lists through the
    entries, so a key is removed from any position in O(1).

Invariants
    - With an unchanged set of ready keys, a key's deliveries differ from its exact share by a few messages (times the
      quantum) at any moment: within 1 % once the key had a few hundred.
    - No starvation: a ready key is served within about (sum of weights / its weight) * 3 * quantum deliveries. A change
      of weight cannot delay it: a raise moves it to a faster class at once, a reduction waits for its next turn.
    - Deterministic: the same calls give the same turns. Only integers, no clock, no randomness.
    - An idle key is forgotten: memory use depends on ready and blocked keys only.

`give_back` returns unused turns, so that they do not count against the key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from basaltmq.errors import InvalidArgumentError

WEIGHT_MAX: Final = (1 << 32) - 1
"""The largest weight that a message row can hold."""

QUANTUM_MAX: Final = 1024
"""A turn longer than the usual batch gains nothing."""

_SCALE: Final = 1 << 80
"""SCALE / (sum of weights) keeps 16 bits of precision with a million keys of the largest weight (2^52)."""


class _Entry:
    """A known key: linked into the ring of its class when ready, unlinked when blocked."""

    __slots__ = ("deficit", "following", "group", "key", "previous", "requested_weight", "weight")

    def __init__(self, key: str, weight: int, group: _Group) -> None:
        self.key = key
        self.weight = weight
        self.requested_weight = weight
        self.deficit = 0
        self.group = group
        self.previous: _Entry | None = None
        self.following: _Entry | None = None


class _Group:
    """A weight class: the ring of its ready keys. The head has the next turn."""

    __slots__ = ("cost", "head", "pass_", "stride", "weights")

    def __init__(self, number: int) -> None:
        self.cost = 1 << number
        self.head: _Entry | None = None
        self.weights = 0
        self.pass_ = 0
        self.stride = 0


class FairScheduler:
    """Assigns turns. Not thread-safe: the caller holds its plane's lock."""

    def __init__(self, quantum: int = 1) -> None:
        if type(quantum) is not int or not 1 <= quantum <= QUANTUM_MAX:
            raise InvalidArgumentError(f"the quantum of a scheduler must be 1 to {QUANTUM_MAX}, got {quantum!r:.80}")
        self._quantum = quantum
        self._entries: dict[str, _Entry] = {}
        self._groups: dict[int, _Group] = {}
        self._active: list[_Group] = []
        self._virtual_time = 0

    def set_quantum(self, quantum: int) -> None:
        """Change the length of runs, for each key from its next round on."""
        assert 1 <= quantum <= QUANTUM_MAX, f"invalid quantum: {quantum}"
        self._quantum = quantum

    def __len__(self) -> int:
        """Number of ready and blocked keys."""
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def is_ready(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.previous is not None

    def weight(self, key: str) -> int | None:
        """The weight requested last; None for an unknown key."""
        entry = self._entries.get(key)
        return None if entry is None else entry.requested_weight

    def deficit(self, key: str) -> int:
        """The rest of the key's deficit in this round, in units of weight; 0 for an unknown key."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.deficit

    def ready(self, key: str, weight: int | None = None) -> None:
        """Mark a key as having messages. `weight` replaces its weight; the default for a new key is 1."""
        entry = self._entries.get(key)
        if entry is None:
            wanted = 1 if weight is None else _checked(weight)
            entry = self._entries[key] = _Entry(key, wanted, self._group(wanted))
            self._link(entry)
            return
        if weight is not None and weight != entry.requested_weight:
            self._request_weight(entry, _checked(weight))
        if entry.previous is None:
            self._link(entry)

    def block(self, key: str) -> None:
        """Give the key no turns until `ready` is called for it."""
        entry = self._entries.get(key)
        if entry is not None and entry.previous is not None:
            self._unlink(entry)

    def idle(self, key: str) -> None:
        """Forget a key that has no messages, including its weight."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.previous is not None:
            self._unlink(entry)

    def clear(self) -> None:
        """Forget all keys."""
        for entry in self._entries.values():
            # Break the reference cycles of the rings.
            entry.previous = entry.following = None
        self._entries.clear()
        for group in self._active:
            group.head, group.weights, group.stride = None, 0, 0
        self._active.clear()

    def take(self, count: int) -> list[tuple[str, int]]:
        """Return the next `count` turns as (key, number of messages), each key once, in the order of their first turn.

        The turns count as used. Return unused ones with `give_back`, and call `idle` for a key found empty. Empty when
        no key is ready.
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
                # A single class is served without comparing classes between messages.
                count = self._take_alone(group, count, turns)
                continue
            self._virtual_time = group.pass_
            group.pass_ += group.stride
            entry.deficit -= cost
            turns[entry.key] = turns.get(entry.key, 0) + 1
            count -= 1
            if entry.deficit < cost:
                entry.deficit += entry.weight * self._quantum
                group.head = entry.following
                if entry.requested_weight != entry.weight:
                    self._apply_weight(entry)
        return list(turns.items())

    def upcoming(self, count: int) -> list[tuple[str, int]]:
        """Return the keys with the next turns and how much each may take, up to `count` per class."""
        found: list[tuple[str, int]] = []
        for group in self._active:
            entry = group.head
            if entry is None:
                continue
            for _ in range(count):
                found.append((entry.key, entry.deficit // group.cost))
                assert entry.following is not None, "keys in a ring are linked"
                entry = entry.following
                if entry is group.head:
                    break
        return found

    def give_back(self, key: str, count: int) -> None:
        """Undo `count` turns that the last `take` gave to a key."""
        if count < 0:
            raise InvalidArgumentError(f"the turns to give back must be 0 or more, got {count}")
        entry = self._entries.get(key)
        if entry is None or entry.previous is None:
            # A removed or blocked key re-enters at the end of its ring without credit.
            return
        group = entry.group
        entry.deficit += count * group.cost
        group.pass_ -= count * group.stride
        if group.pass_ < self._virtual_time:
            self._virtual_time = group.pass_

    def deliver(
        self,
        count: int,
        fetch: Callable[[str, int], tuple[int, bool]],
        prepare: Callable[[list[tuple[str, int]]], None] | None = None,
    ) -> int:
        """Take turns until `count` messages are fetched or no key is ready. Return the number fetched.

        `fetch(key, most)` fetches up to `most` messages of a key. It returns how many it got, and whether the key can
        deliver more now. If not, the key becomes idle, unless `fetch` called `block` for it. `prepare` gets the turns
        before the first fetch.
        """
        left = count
        entries = self._entries
        while left > 0:
            turns = self.take(left)
            if not turns:
                break
            at = 0
            weight_changes: dict[_Group, int] = {}
            try:
                if prepare is not None:
                    prepare(turns)
                for key, most in turns:
                    got, more = fetch(key, most)
                    at += 1
                    assert 0 <= got <= most
                    assert got or not more, "a key with more messages returns at least one"
                    left -= got
                    if not more:
                        entry = entries.get(key)
                        if entry is not None and entry.previous is not None:
                            del entries[key]
                            self._detach(entry)
                            group = entry.group
                            weight_changes[group] = weight_changes.get(group, 0) - entry.weight
                    elif got < most:
                        self.give_back(key, most - got)
            except BaseException:
                for key, most in turns[at:]:
                    self.give_back(key, most)
                raise
            finally:
                # Update the sum of a class once for all keys that left it.
                for group, change in weight_changes.items():
                    self._change_sum(group, change)
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
                group.head = entry.following
                if entry.requested_weight != entry.weight:
                    changed = entry
                    break
            else:
                entry.deficit = deficit
        group.pass_ += (wanted - count) * stride
        self._virtual_time = group.pass_ - stride
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
        """Add a key at the end of the ring of its class."""
        if entry.requested_weight != entry.weight:
            entry.weight = entry.requested_weight
            entry.group = self._group(entry.weight)
        entry.deficit = entry.weight * self._quantum
        group = entry.group
        head = group.head
        if head is None:
            entry.previous = entry.following = entry
            group.head = entry
        else:
            last = head.previous
            assert last is not None
            entry.previous, entry.following = last, head
            last.following = head.previous = entry
        self._change_sum(group, entry.weight)

    def _unlink(self, entry: _Entry) -> None:
        self._detach(entry)
        self._change_sum(entry.group, -entry.weight)

    def _detach(self, entry: _Entry) -> None:
        """Remove a key from its ring. The caller updates the sum of the class."""
        group = entry.group
        before, following = entry.previous, entry.following
        assert before is not None
        assert following is not None
        if following is entry:
            group.head = None
        else:
            before.following, following.previous = following, before
            if group.head is entry:
                group.head = following
        entry.previous = entry.following = None

    def _change_sum(self, group: _Group, change: int) -> None:
        """Change the sum of a class's ready weights, and scale its distance from the virtual time."""
        before = group.weights
        after = group.weights = before + change
        if before == 0:
            self._active.append(group)
            self._active.sort(key=lambda active: active.cost)
            group.stride = _SCALE // after
            group.pass_ = self._virtual_time + group.stride
        elif after == 0:
            self._active.remove(group)
            group.stride = 0
        else:
            ahead = group.pass_ - self._virtual_time
            stride = _SCALE // after
            # One message ahead stays one message ahead. This is the usual case, at a third of the cost.
            group.pass_ = self._virtual_time + (stride if ahead == group.stride else ahead * before // after)
            group.stride = stride

    def _request_weight(self, entry: _Entry, wanted: int) -> None:
        """Raise a weight at once, lower it at the key's next turn, so that alternating weights never delay a key."""
        entry.requested_weight = wanted
        if entry.previous is not None and wanted > entry.weight:
            self._apply_weight(entry)

    def _apply_weight(self, entry: _Entry) -> None:
        wanted = entry.requested_weight
        if wanted.bit_length() == entry.weight.bit_length():
            self._change_sum(entry.group, wanted - entry.weight)
            entry.weight = wanted
        else:
            self._unlink(entry)
            self._link(entry)


def _checked(weight: int) -> int:
    if type(weight) is not int or not 1 <= weight <= WEIGHT_MAX:
        raise InvalidArgumentError(f"the weight of a fairness key must be 1 to {WEIGHT_MAX}, got {weight!r:.80}")
    return weight
