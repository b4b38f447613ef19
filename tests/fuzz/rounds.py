"""Common code of the fuzzers: seeds, forbidden faults, checks between rounds, command line."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator


class Faults(logging.Handler):
    """Records logged errors that must not happen."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


async def run_rounds(
    module: str,
    one_round: Callable[[int], Awaitable[None]],
    check: Callable[[], Awaitable[None]],
    seeds: Iterator[int],
    stop: Callable[[int], bool],
    check_every: int,
) -> int:
    """Run rounds until `stop` returns True. Return their number. Errors name `module` to repeat a seed."""
    faults = Faults()
    logger = logging.getLogger("basaltmq")
    logger.addHandler(faults)
    level, logger.level = logger.level, logging.ERROR
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.seen.append(str(context)))
    count = 0
    try:
        for seed in seeds:
            if stop(count):
                break
            try:
                await one_round(seed)
                assert not faults.seen, faults.seen[0]
                count += 1
                if count % check_every == 0:
                    await check()
            except BaseException as error:
                error.add_note(f"seed {seed}: run python -m {module} --seed {seed} --rounds 1")
                raise
        await check()
    finally:
        logger.removeHandler(faults)
        logger.level = level
    return count


def command(what: str, fuzz: Callable[[Iterator[int], Callable[[int], bool]], Awaitable[int]]) -> None:
    """`python -m tests.fuzz.NAME [--seconds N | --rounds N] [--seed N]`."""
    parser = argparse.ArgumentParser(description=f"Fuzz {what}.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 40))
    given = parser.parse_args()
    rounds: int = given.rounds
    print(f"seeds from {given.seed} on", flush=True)
    until = time.monotonic() + given.seconds

    def stop(count: int) -> bool:
        return count >= rounds if rounds else time.monotonic() > until

    async def work() -> int:
        return await fuzz(itertools.count(given.seed), stop)

    print(f"{asyncio.run(work())} sessions, nothing found")
