"""Common code of all clients: stop signal, random generator, classification of errors."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod

from tests.interop.server import Broker
from tests.soak.ledger import Ledger

RETRY_S = 0.2
"""Pause of a client before it reconnects."""

SESSION_ERRORS_MAX = 20
"""Sessions that may fail in a round while the broker runs. More of them are a problem."""


class Round:
    """One round: from the start of the clients to the end of the broker."""

    def __init__(self, broker: Broker, ledger: Ledger, number: int, seed: int) -> None:
        self.broker = broker
        self.ledger = ledger
        self.number = number
        self.seed = seed
        self.stopping = threading.Event()
        """End the clients before a stop or kill of the broker. From here on errors are expected."""

    def pause(self, seconds: float) -> bool:
        """Wait. Return False if the round ends."""
        return not self.stopping.wait(seconds)


class Client(ABC):
    """A client in a thread. `session` works until the round or its connection ends."""

    name = "client"
    expected: tuple[type[BaseException], ...] = (OSError,)
    """Return the errors that a stopped broker causes."""

    def __init__(self, turn: Round, name: str) -> None:
        self.turn = turn
        self.ledger = turn.ledger
        self.broker = turn.broker
        self.name = name
        self.random = random.Random(f"{turn.seed}.{turn.number}.{name}")
        self.thread = threading.Thread(target=self._run, name=f"soak-{name}", daemon=True)
        self._failures: list[str] = []

    def _run(self) -> None:
        while not self.turn.stopping.is_set():
            try:
                self.session()
            except self.expected as error:
                self._failed(error)
            except Exception as error:
                if not self.turn.stopping.is_set():
                    self.ledger.problem(f"{self.name}: {type(error).__name__}: {error}")
                    return
            time.sleep(RETRY_S)

    def _failed(self, error: BaseException) -> None:
        if self.turn.stopping.is_set():
            return
        self._failures.append(f"{type(error).__name__}: {error}")
        if len(self._failures) >= SESSION_ERRORS_MAX:
            self.ledger.problem(f"{self.name} cannot work: {self._failures[0]} ... {self._failures[-1]}")
            self.turn.stopping.wait()

    @abstractmethod
    def session(self) -> None: ...
