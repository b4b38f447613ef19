"""The broker's log on stderr: text lines, or one JSON object per line. A thread writes it.

Lines pass through a bounded queue, so a slow reader never blocks the event loop. Lines that do not fit are dropped, and
the next line reports their number. Names from clients may occur in a line, so control characters are escaped. Payloads
and passwords are never logged.

Under systemd the journal adds time and unit. Lines then begin with their priority (`<4>`) instead of the time.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, TextIO

import msgspec

LINES_WAITING_MAX: Final = 10_000
"""Queue limit, about 2 MB of text."""

CLOSE_WAIT_S: Final = 2.0
"""Time limit for the last lines at shutdown, in case the reader of stderr is stuck."""

_PRIORITY: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_STANDARD_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def one_line(text: str) -> str:
    """Escape control characters, so that the text stays on one line and cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields that the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}


class TextFormatter(logging.Formatter):
    """2026-01-02 03:04:05.678 WARNING broker.vhost: message key=value"""

    def __init__(self, *, journal: bool = False) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        logger = record.name.removeprefix("basaltmq.")
        fields = "".join(f" {name}={one_line(str(value))}" for name, value in fields_of(record).items())
        body = f"{logger}: {one_line(record.getMessage())}{fields}"
        if record.exc_info:
            body += "\n" + self.formatException(record.exc_info)
        if self._journal:
            return f"<{_PRIORITY.get(record.levelno, 6)}>{body}"
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{stamp}.{int(record.msecs):03d} {record.levelname:<7} {body}"


class JsonFormatter(logging.Formatter):
    """{"time": "2026-01-02T03:04:05.678Z", "level": "warning", "logger": "...", "message": "...", ...}"""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


class LineWriter(logging.Handler):
    """Formats lines in the calling thread, and writes them in its own thread."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._waiting: queue.Queue[str | None] = queue.Queue(LINES_WAITING_MAX)
        self.dropped = 0
        self._reported = 0
        self._thread = threading.Thread(target=self._write, name="basalt-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            self.dropped += 1
        except Exception:
            self.handleError(record)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                if self.dropped > self._reported:
                    self._reported, missing = self.dropped, self.dropped - self._reported
                    self._stream.write(f"{missing} log lines dropped: stderr was too slow\n")
                self._stream.write(line + "\n")
                if self._waiting.empty():
                    self._stream.flush()
            except (OSError, ValueError):
                # The reader of stderr is gone. The broker continues without a log.
                self.dropped += 1

    def close(self) -> None:
        """Write the queued lines, then stop the thread."""
        if self._thread.is_alive():
            try:
                self._waiting.put(None, timeout=CLOSE_WAIT_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_WAIT_S)
        super().close()


class Logs:
    """The log configuration of a process. `change` applies a reload."""

    def __init__(
        self,
        level: str,
        form: str,
        *,
        stream: TextIO | None = None,
        environment: Mapping[str, str],
        root: logging.Logger | None = None,
    ) -> None:
        self._journal = "JOURNAL_STREAM" in environment
        self._root = root or logging.getLogger()
        self._handler = LineWriter(stream or sys.stderr)
        self.change(level, form)
        self._root.addHandler(self._handler)

    def change(self, level: str, form: str) -> None:
        make: Callable[[], logging.Formatter] = JsonFormatter if form == "json" else self._text
        self._handler.setFormatter(make())
        self._root.setLevel(level.upper())
        # Their debug output would hide that of Basalt.
        for noisy in ("asyncio", "hpack"):
            logging.getLogger(noisy).setLevel(logging.WARNING)

    def _text(self) -> logging.Formatter:
        return TextFormatter(journal=self._journal)

    def close(self) -> None:
        self._root.removeHandler(self._handler)
        self._handler.close()
