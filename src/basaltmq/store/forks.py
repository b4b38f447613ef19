"""Protects an open store in forked children, which inherit its open files but not its threads.

A child that used its parent's store would write into the parent's WAL at the parent's position and lose confirmed data.
A child that waits for a sync would wait for a thread that does not exist there. A child that closes the database would
wait for RocksDB's threads. So every open object is disabled in the child: it rejects every call, and RocksDB objects
are never freed. The parent is not affected. A child may open its own view, or the store after the parent's close.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable


def in_child(action: Callable[[], None]) -> None:
    """Call `action`, a bound method, in every child forked while its object exists. Retains about 300 bytes."""
    reference = weakref.WeakMethod(action)

    def run() -> None:
        method = reference()
        if method is not None:
            method()

    os.register_at_fork(after_in_child=run)


def never_free(objects: Iterable[object]) -> None:
    """Keep objects alive until the process ends, even through interpreter shutdown."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
