"""Runs the broker, and measures the turns of its loop.

    python -m bench.client_latency_watch FILE serve --data-dir=...

A timer on the loop runs every 2 ms. FILE gets the longest turn as a double: seconds of processor time of the loop's
thread, which do not depend on other programs. Writing 0.0 to FILE resets it.

With BASALT_WATCH, a thread samples the stack of the loop's thread every 2 ms while the timer is late, and prints to
stderr the samples of a turn that took longer than BASALT_WATCH_MS (default 30). Time in which the loop's thread was
ready to run and did not (schedstat) does not count. A call that holds the GIL delays the sample to its end, so the
sample shows the caller and the number of milliseconds that it covers.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

from basaltmq.cli.main import main

EVERY_S: Final = 0.002
LONG_S: Final = float(os.environ.get("BASALT_WATCH_MS", "30")) / 1000
DEPTH: Final = 7
LINES_MAX: Final = 6
_LONGEST: Final = struct.Struct("<d")


class LongestTurn:
    """The longest turn of a loop, in a file that both processes map."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(_LONGEST.pack(0.0))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LONGEST.size)

    @property
    def cpu_s(self) -> float:
        found: tuple[float] = _LONGEST.unpack(self._map)
        return found[0]

    @cpu_s.setter
    def cpu_s(self, cpu_s: float) -> None:
        _LONGEST.pack_into(self._map, 0, cpu_s)


class Beat:
    """Calls back after each beat of the loop, with its length in processor time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[float], None]) -> None:
        self._loop = loop
        self._ended = ended
        self._cpu_s = time.thread_time()

    def start(self) -> None:
        cpu_s = time.thread_time()
        self._ended(cpu_s - self._cpu_s)
        self._cpu_s = cpu_s
        self._loop.call_later(EVERY_S, self.start)


class Watch:
    """Samples the loop's thread during long turns."""

    def __init__(self) -> None:
        self._thread_id = threading.get_ident()
        self._schedstat = os.open(f"/proc/{os.getpid()}/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._beat_s = self._now_s()
        self._turn: tuple[float, float] | None = None
        self._gc_s = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._collected)
        threading.Thread(target=self._sample, daemon=True).start()

    def _now_s(self) -> float:
        return time.perf_counter() - int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9

    def _collected(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_s = time.thread_time()
        elif (took_s := time.thread_time() - self._gc_s) > LONG_S / 3:
            print(f"WATCH gc generation {info['generation']}: {took_s * 1000:.0f} ms", file=sys.stderr, flush=True)

    def ended(self, cpu_s: float) -> None:
        """Handle the end of a beat."""
        now_s = self._now_s()
        if now_s - self._beat_s > LONG_S:
            self._turn = (now_s - self._beat_s, cpu_s)
        self._beat_s = now_s

    def _sample(self) -> None:
        samples: Counter[str] = Counter()
        beat_s = last_s = self._now_s()
        while True:
            time.sleep(EVERY_S)
            now_s = self._now_s()
            if self._beat_s != beat_s:
                if self._turn is not None:
                    self._print(self._turn, samples)
                self._turn = None
                beat_s = self._beat_s
                samples.clear()
            elif now_s - beat_s > 3 * EVERY_S:
                frame = sys._current_frames().get(self._thread_id)
                samples[_line(frame)] += round((now_s - last_s) * 1000)
                if now_s - last_s > 5 * EVERY_S:
                    # Another thread may have held the GIL.
                    for number, other in sys._current_frames().items():
                        if number not in (self._thread_id, threading.get_ident()):
                            samples["other thread: " + _line(other)] += round((now_s - last_s) * 1000)
            last_s = now_s

    def _print(self, turn: tuple[float, float], samples: Counter[str]) -> None:
        print(f"WATCH turn {turn[0] * 1000:.0f} ms, CPU {turn[1] * 1000:.0f} ms", file=sys.stderr)
        for line, took_ms in samples.most_common(LINES_MAX):
            print(f"   {took_ms:4} ms {line}", file=sys.stderr, flush=True)


def _line(frame: FrameType | None) -> str:
    stack = traceback.extract_stack(frame)[-DEPTH:]
    return " > ".join(f"{each.filename.rsplit('/', 1)[-1]}:{each.lineno}:{each.name}" for each in stack)


def _watched(path: Path) -> None:
    import uvloop

    make = uvloop.new_event_loop
    longest = LongestTurn(path)

    def new_event_loop() -> Any:
        loop = make()
        watch = Watch() if os.environ.get("BASALT_WATCH") else None

        def ended(cpu_s: float) -> None:
            longest.cpu_s = max(longest.cpu_s, cpu_s)
            if watch is not None:
                watch.ended(cpu_s)

        if watch is not None:
            loop.call_soon(watch.start)
        loop.call_soon(Beat(loop, ended).start)
        return loop

    uvloop.new_event_loop = new_event_loop
    main(prog_name="basalt")


if __name__ == "__main__":
    _watched(Path(sys.argv.pop(1)))
