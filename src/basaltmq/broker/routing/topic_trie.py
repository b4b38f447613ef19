"""Topic patterns as a trie of words. The cost of a match depends on the key's words, not on the number of bindings.

`*` matches one word, `#` any number of words including none. The trie holds the patterns that are cheap in it: without
wildcards, or with at most WORDS_MAX words and `#` only at the end. A match then visits at most 2 ** WORDS_MAX nodes per
word. All other patterns are in `PatternBlocks`.

The trie counts the bindings of a destination per pattern, because bindings may differ in their arguments only.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar

from basaltmq.broker.routing.topic_blocks import PatternBlocks

D = TypeVar("D")

WORDS_MAX: Final = 8
"""Words of a pattern with wildcards in the trie."""


class _Node(Generic[D]):
    __slots__ = ("any_word", "any_words", "ends", "words")

    def __init__(self) -> None:
        self.words: dict[str, _Node[D]] = {}
        self.any_word: _Node[D] | None = None
        self.ends: dict[D, int] = {}
        """Destinations of patterns that end here, with their number of bindings."""
        self.any_words: dict[D, int] = {}
        """Destinations of patterns that end here with `#`."""

    def is_empty(self) -> bool:
        return not (self.words or self.ends or self.any_word or self.any_words)

    def child(self, word: str) -> _Node[D] | None:
        return self.any_word if word == "*" else self.words.get(word)

    def grow(self, word: str) -> _Node[D]:
        found = self.child(word)
        if found is None:
            found = _Node()
            if word == "*":
                self.any_word = found
            else:
                self.words[word] = found
        return found

    def cut(self, word: str) -> None:
        if word == "*":
            self.any_word = None
        else:
            del self.words[word]


class TopicTrie(Generic[D]):
    """Maps a routing key to the destinations of all matching patterns."""

    def __init__(self) -> None:
        self._root: _Node[D] = _Node()
        self._blocks: PatternBlocks[D] = PatternBlocks()

    def is_empty(self) -> bool:
        return self._root.is_empty() and self._blocks.is_empty()

    def add(self, pattern: str, destination: D) -> None:
        words = pattern.split(".")
        if _is_expensive(words):
            self._blocks.add(tuple(words), destination)
            return
        node = self._root
        has_rest = words[-1] == "#"
        for word in words[:-1] if has_rest else words:
            node = node.grow(word)
        counts = node.any_words if has_rest else node.ends
        counts[destination] = counts.get(destination, 0) + 1

    def remove(self, pattern: str, destination: D) -> None:
        """Remove a pattern that was added before, and prune empty branches."""
        words = pattern.split(".")
        if _is_expensive(words):
            self._blocks.remove(tuple(words), destination)
            return
        has_rest = words[-1] == "#"
        if has_rest:
            words.pop()
        path = [self._root]
        for word in words:
            node = path[-1].child(word)
            assert node is not None, f"the pattern {pattern!r} was not added"
            path.append(node)
        counts = path[-1].any_words if has_rest else path[-1].ends
        counts[destination] -= 1
        if not counts[destination]:
            del counts[destination]
        for parent, word, node in reversed(list(zip(path, words, path[1:], strict=False))):
            if not node.is_empty():
                break
            parent.cut(word)

    def match(self, key: str) -> set[D]:
        found: set[D] = set()
        words = key.split(".")
        self._blocks.match(words, found)
        places = [self._root]
        for word in words:
            after: list[_Node[D]] = []
            for node in places:
                if node.any_words:
                    found.update(node.any_words)
                named = node.words.get(word)
                if named is not None:
                    after.append(named)
                if node.any_word is not None:
                    after.append(node.any_word)
            places = after
            if not places:
                return found
        for node in places:
            found.update(node.ends)
            found.update(node.any_words)
        return found


def _is_expensive(words: list[str]) -> bool:
    if "#" in words[:-1]:
        return True
    return len(words) > WORDS_MAX and ("*" in words or words[-1] == "#")
