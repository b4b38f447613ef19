"""An import in a separate process that kills itself at a step (see test_imports)."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.crash.harness import Emit

from basaltmq.streams.drivers import Drivers
from basaltmq.streams.imports import stage
from basaltmq.streams.imports.imports import Imports, open_imports
from basaltmq.streams.imports.stage import Part


def run(emit: Emit, path: str, run_name: str, batch: int, parts: str, dies_at: int) -> None:
    """Import staged parts. Print each step, and exit after the given step, counted from 1."""
    steps = 0

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            nonlocal steps
            result = call(*args, **named)
            steps += 1
            emit(name)
            if steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    Imports._save = counted("saved", Imports._save)  # type: ignore[method-assign]
    Drivers._append = counted("appended", Drivers._append)  # type: ignore[method-assign]
    Drivers.wait = counted("durable", Drivers.wait)  # type: ignore[method-assign]
    stage.remove = counted("removed", stage.remove)
    with open_imports(Path(path)) as imports:
        imports.run(run_name, batch, msgspec.json.decode(parts, type=list[Part]))
