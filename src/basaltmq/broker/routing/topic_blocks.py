"""Topic patterns with expensive wildcards, matched bit-parallel in blocks.

While a key is read, a pattern such as `#.a.*.a` can be at many of its words at once. So a search costs the product of
the words of the key and of all patterns. In a trie of Python objects, 1,000 such patterns take seconds per message.
Here a position in a pattern is a bit of an integer, and one operation advances all patterns of a block:

    pattern a.#.*     tokens a, *             bit i: the first i tokens have matched
                      bits   0   1   2        `#` after token 1: bit 1 stays whatever word comes

    for each word of the key:    at = (at << 1) & (accepts[word] | stars)  |  at & stays

Bit 0 of a pattern is never reached by a shift, so patterns do not affect each other. A block has at most BLOCK_BITS
bits, because every distinct word of a block needs an integer of that size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, TypeVar

D = TypeVar("D")

BLOCK_BITS: Final = 1024
"""Size of a block. A longer one costs less time per pattern and more memory per distinct word."""


class _Block(Generic[D]):
    __slots__ = ("accepts", "ends", "free", "lost", "patterns", "stars", "starts", "stays", "targets")

    def __init__(self) -> None:
        self.free = 0
        """First unused bit."""
        self.lost = 0
        """Bits of removed patterns."""
        self.starts = self.stars = self.stays = self.ends = 0
        self.accepts: dict[str, int] = {}
        self.targets: dict[int, dict[D, int]] = {}
        """Destinations by the last bit of their pattern, with their number of bindings."""
        self.patterns: dict[tuple[str, ...], tuple[int, int]] = {}
        """First and last bit of each pattern."""

    def has_room(self, words: Sequence[str]) -> bool:
        return self.free + len(words) + 1 <= BLOCK_BITS or not self.free

    def add(self, words: tuple[str, ...], targets: dict[D, int]) -> None:
        at = first = self.free
        for word in words:
            if word == "#":
                self.stays |= 1 << at
                continue
            at += 1
            if word == "*":
                self.stars |= 1 << at
            else:
                self.accepts[word] = self.accepts.get(word, 0) | 1 << at
        self.free = at + 1
        self.starts |= 1 << first
        self.ends |= 1 << at
        self.targets[at] = targets
        self.patterns[words] = (first, at)

    def remove(self, words: tuple[str, ...]) -> None:
        """Stop matching a pattern. Its bits stay unused."""
        first, last = self.patterns.pop(words)
        self.starts &= ~(1 << first)
        self.ends &= ~(1 << last)
        self.lost += last - first + 1
        del self.targets[last]

    def is_sparse(self) -> bool:
        return self.lost > self.free // 2

    def match(self, key: Sequence[str], found: set[D]) -> None:
        at, stars, stays, accepts = self.starts, self.stars, self.stays, self.accepts
        for word in key:
            at = (at << 1) & (accepts.get(word, 0) | stars) | at & stays
            if not at:
                return
        hits = at & self.ends
        while hits:
            last = hits.bit_length() - 1
            found.update(self.targets[last])
            hits ^= 1 << last


class PatternBlocks(Generic[D]):
    """Maps a key to the destinations of all matching patterns. Patterns and keys are sequences of words."""

    def __init__(self) -> None:
        self._blocks: list[_Block[D]] = []
        self._block_of: dict[tuple[str, ...], _Block[D]] = {}

    def is_empty(self) -> bool:
        return not self._blocks

    def add(self, words: tuple[str, ...], destination: D) -> None:
        block = self._block_of.get(words)
        if block is None:
            if not self._blocks or not self._blocks[-1].has_room(words):
                self._blocks.append(_Block())
            block = self._block_of[words] = self._blocks[-1]
            block.add(words, {destination: 1})
            return
        targets = block.targets[block.patterns[words][1]]
        targets[destination] = targets.get(destination, 0) + 1

    def remove(self, words: tuple[str, ...], destination: D) -> None:
        """Remove a pattern that was added before."""
        block = self._block_of[words]
        targets = block.targets[block.patterns[words][1]]
        targets[destination] -= 1
        if not targets[destination]:
            del targets[destination]
        if not targets:
            del self._block_of[words]
            block.remove(words)
            if block.is_sparse():
                self._compact(block)

    def _compact(self, sparse: _Block[D]) -> None:
        """Replace a block by one without the bits of removed patterns, or by none."""
        at = self._blocks.index(sparse)
        if not sparse.patterns:
            del self._blocks[at]
            return
        block = self._blocks[at] = _Block()
        for words, (_, last) in sparse.patterns.items():
            block.add(words, sparse.targets[last])
            self._block_of[words] = block

    def match(self, key: Sequence[str], found: set[D]) -> None:
        """Add the destinations of all matching patterns to `found`."""
        for block in self._blocks:
            block.match(key, found)
