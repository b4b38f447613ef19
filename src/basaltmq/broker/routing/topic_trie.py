"""Topic patterns as a trie of words, so that matching costs what the key's words cost and not what is bound.

`*` stands for one word, `#` for any number of words, none included. A key is walked with a set of places in the trie;
two `#` in a row of patterns could reach one place in many ways, so every place is visited once per word.

A destination is counted per pattern: two bindings that differ in their arguments alone are one way to it.
"""

from __future__ import annotations

from typing import Generic, TypeVar

D = TypeVar("D")


class _Node(Generic[D]):
    __slots__ = ("any_word", "any_words", "ends", "loops", "words")

    def __init__(self, *, loops: bool = False) -> None:
        self.loops = loops
        """Reached by `#`: any further word leads here again."""
        self.words: dict[str, _Node[D]] = {}
        self.any_word: _Node[D] | None = None
        self.any_words: _Node[D] | None = None
        self.ends: dict[D, int] = {}
        """Destinations of patterns that end here, and how many bindings each has."""

    def is_empty(self) -> bool:
        return not (self.words or self.ends or self.any_word or self.any_words)

    def child(self, word: str) -> _Node[D] | None:
        if word == "*":
            return self.any_word
        return self.any_words if word == "#" else self.words.get(word)

    def grow(self, word: str) -> _Node[D]:
        found = self.child(word)
        if found is None:
            found = _Node(loops=word == "#")
            if word == "*":
                self.any_word = found
            elif word == "#":
                self.any_words = found
            else:
                self.words[word] = found
        return found

    def cut(self, word: str) -> None:
        if word == "*":
            self.any_word = None
        elif word == "#":
            self.any_words = None
        else:
            del self.words[word]


class TopicTrie(Generic[D]):
    """Which destinations a routing key reaches."""

    def __init__(self) -> None:
        self._root: _Node[D] = _Node()

    def add(self, pattern: str, destination: D) -> None:
        node = self._root
        for word in pattern.split("."):
            node = node.grow(word)
        node.ends[destination] = node.ends.get(destination, 0) + 1

    def remove(self, pattern: str, destination: D) -> None:
        """Take away what was added before; branches that lead nowhere go."""
        path = [self._root]
        words = pattern.split(".")
        for word in words:
            node = path[-1].child(word)
            assert node is not None, f"the pattern {pattern!r} was not added"
            path.append(node)
        ends = path[-1].ends
        ends[destination] -= 1
        if not ends[destination]:
            del ends[destination]
        for parent, word, node in reversed(list(zip(path, words, path[1:], strict=False))):
            if not node.is_empty():
                break
            parent.cut(word)

    def match(self, key: str) -> set[D]:
        found: set[D] = set()
        places: set[_Node[D]] = set()
        self._enter(self._root, places)
        for word in key.split("."):
            after: set[_Node[D]] = set()
            for node in places:
                named = node.words.get(word)
                if named is not None:
                    self._enter(named, after)
                if node.any_word is not None:
                    self._enter(node.any_word, after)
                if node.loops:
                    self._enter(node, after)
            places = after
            if not places:
                return found
        for node in places:
            found.update(node.ends)
        return found

    def _enter(self, node: _Node[D], places: set[_Node[D]]) -> None:
        """Be at a node, and behind every `#` that follows it, because `#` may stand for no word."""
        while node not in places:
            places.add(node)
            if node.any_words is None:
                return
            node = node.any_words
