"""Topic patterns as a trie of words. The cost of a match depends on the key's words, not on the number of bindings.

`*` matches one word, `#` any number of words including none. A match walks the key with a set of trie nodes. Several
`#` can lead to the same node in many ways, so each node is visited once per word.

The trie counts the bindings of a destination per pattern, because bindings may differ in their arguments only.
"""

from __future__ import annotations

from typing import Generic, TypeVar

D = TypeVar("D")


class _Node(Generic[D]):
    __slots__ = ("any_word", "any_words", "ends", "loops", "words")

    def __init__(self, *, loops: bool = False) -> None:
        self.loops = loops
        """Whether `#` leads here. Any further word then stays at this node."""
        self.words: dict[str, _Node[D]] = {}
        self.any_word: _Node[D] | None = None
        self.any_words: _Node[D] | None = None
        self.ends: dict[D, int] = {}
        """Destinations of patterns that end here, with their number of bindings."""

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
    """Maps a routing key to the destinations of all matching patterns."""

    def __init__(self) -> None:
        self._root: _Node[D] = _Node()

    def add(self, pattern: str, destination: D) -> None:
        node = self._root
        for word in pattern.split("."):
            node = node.grow(word)
        node.ends[destination] = node.ends.get(destination, 0) + 1

    def remove(self, pattern: str, destination: D) -> None:
        """Remove a pattern that was added before, and prune empty branches."""
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
        """Add a node, and every node reached from it by `#`, because `#` may match no word."""
        while node not in places:
            places.add(node)
            if node.any_words is None:
                return
            node = node.any_words
