"""The filters of one session, and which of them match a topic name.

A message reaches a session once, with the highest QoS and all subscription identifiers of the matching filters. Most
filters have no wildcard; a dictionary finds them. The others are a trie of levels: `+` is a level like any other, `#`
is a value of the node above it. A match follows at most two branches per node, and none that no filter has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from basaltmq.protocols.mqtt.wire.topics import has_wildcard

V = TypeVar("V")


class _Node(Generic[V]):
    __slots__ = ("levels", "rest", "value")

    def __init__(self) -> None:
        self.levels: dict[str, _Node[V]] = {}
        self.value: tuple[V] | None = None
        """Value of the filter that ends here."""
        self.rest: tuple[V] | None = None
        """Value of the filter that ends here with `#`."""

    def is_empty(self) -> bool:
        return not self.levels and self.value is None and self.rest is None


class FilterTrie(Generic[V]):
    """Maps a topic name to the values of all matching filters. A filter has one value."""

    __slots__ = ("_count", "_exact", "_root")

    def __init__(self) -> None:
        self._exact: dict[str, V] = {}
        self._root: _Node[V] = _Node()
        self._count = 0
        """Filters in the trie."""

    def __len__(self) -> int:
        return len(self._exact) + self._count

    def __setitem__(self, topic_filter: str, value: V) -> None:
        """Add a filter without `$share`, or replace its value."""
        if not has_wildcard(topic_filter):
            self._exact[topic_filter] = value
            return
        node = self._root
        levels = topic_filter.split("/")
        has_rest = levels[-1] == "#"
        for level in levels[:-1] if has_rest else levels:
            below = node.levels.get(level)
            if below is None:
                below = node.levels[level] = _Node()
            node = below
        if has_rest:
            self._count += node.rest is None
            node.rest = (value,)
        else:
            self._count += node.value is None
            node.value = (value,)

    def __delitem__(self, topic_filter: str) -> None:
        """Remove a filter and prune empty branches. Raise KeyError if it was not added."""
        if not has_wildcard(topic_filter):
            del self._exact[topic_filter]
            return
        levels = topic_filter.split("/")
        has_rest = levels[-1] == "#"
        if has_rest:
            del levels[-1]
        path = [self._root]
        for level in levels:
            path.append(path[-1].levels[level])
        last = path[-1]
        if (last.rest if has_rest else last.value) is None:
            raise KeyError(topic_filter)
        if has_rest:
            last.rest = None
        else:
            last.value = None
        self._count -= 1
        for above, level, node in reversed(list(zip(path, levels, path[1:], strict=False))):
            if not node.is_empty():
                break
            del above.levels[level]

    def match(self, topic: str) -> list[V]:
        """Return the values of all filters that match, in no particular order."""
        found: list[V] = [self._exact[topic]] if topic in self._exact else []
        if self._count:
            found.extend(self._match(topic))
        return found

    def _match(self, topic: str) -> Iterator[V]:
        nodes = [self._root]
        # Wildcards of the first level do not match names that begin with `$`.
        has_wildcards = not topic.startswith("$")
        for level in topic.split("/"):
            below: list[_Node[V]] = []
            for node in nodes:
                if has_wildcards:
                    if node.rest is not None:
                        yield from node.rest
                    any_level = node.levels.get("+")
                    if any_level is not None:
                        below.append(any_level)
                named = node.levels.get(level)
                if named is not None:
                    below.append(named)
            has_wildcards = True
            nodes = below
            if not nodes:
                return
        for node in nodes:
            if node.value is not None:
                yield from node.value
            # `a/#` also matches `a`.
            if node.rest is not None:
                yield from node.rest
