"""What a fork does to a store: the child gets the open files, but not the threads behind them.

A child that went on using its parent's store would write into the parent's log at the parent's place, and lose what
the parent confirmed; one that waits for a sync waits for a thread that is not there; one that closes the database waits
for RocksDB's threads. So in the child everything that is open is cut off: it refuses every call, and what belongs
to RocksDB is never freed. The parent notices nothing. A child opens a view of its own, or the
store once the parent has closed it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterable


def in_child(action: Callable[[], None]) -> None:
    """Call `action`, a bound method, in every child forked while its object lives. Keeps some 300 bytes for good."""
    reference = weakref.WeakMethod(action)

    def cut_off() -> None:
        method = reference()
        if method is not None:
            method()

    os.register_at_fork(after_in_child=cut_off)


def never_free(objects: Iterable[object]) -> None:
    """Keep objects alive until the process is gone, past the end of the interpreter."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
