"""`basalt serve`: run the broker.

Exit codes follow sysexits.h: 0 after a requested stop, 69 address or port unavailable, 70 internal error, 74 disk
error, 75 data directory in use by another process, 77 no permission, 78 invalid settings. With `vhosts.on_failure =
"stop_node"`, a virtual host that stays down also ends the broker with 74.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

import click

from basaltmq import __version__
from basaltmq.broker.config.settings import Config
from basaltmq.broker.config.sources import Loaded, describe
from basaltmq.cli.server.lifecycle import Serving
from basaltmq.cli.server.logs import Logs
from basaltmq.cli.server.settings import with_settings
from basaltmq.cli.server.welcome import welcome
from basaltmq.errors import (
    AddressUnavailableError,
    BasaltError,
    InvalidConfigError,
    NotAStoreError,
    StorageError,
    StoreLockedError,
    StoreReadOnlyError,
    install_hint,
)

EXIT_CODES: Final[tuple[tuple[type[BasaltError], int], ...]] = (
    (AddressUnavailableError, 69),
    (StoreLockedError, 75),
    (StoreReadOnlyError, 77),
    (NotAStoreError, 78),
    (InvalidConfigError, 78),
    (StorageError, 74),
    (BasaltError, 70),
)
INTERNAL: Final = 70

SWITCH_S: Final = 0.0003
"""GIL switch interval. With Python's default of 5 ms, a due sync starts late, which costs a tenth of the confirms under
load."""

NO_PERMISSION: Final = 77


def exit_code(error: BasaltError) -> int:
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_settings
@click.option("--print-config", is_flag=True, help="Print every setting with its meaning and source, and exit.")
@click.option(
    "--recover-vhosts",
    is_flag=True,
    help="Serve virtual hosts that have a directory but no entry in the node store. If the node store is "
    "missing, users and "
    "permissions are reset to their defaults.",
)
@click.option("--quiet", is_flag=True, help="Print nothing on stdout. The log on stderr is not affected.")
def serve(settings: Callable[[], Loaded], print_config: bool, quiet: bool, recover_vhosts: bool) -> None:
    """Run the broker.

    It serves AMQP 0-9-1 and 1.0, Kafka, MQTT, RocketMQ, gRPC, and the admin API over HTTP.

    Every setting can come from --config FILE, from a BASALT_... variable or from a flag. --print-config lists all
    settings; this page shows only the most common flags.
    """
    try:
        loaded = settings()
    except InvalidConfigError as error:
        _print_error(error)
        raise SystemExit(exit_code(error)) from error
    if print_config:
        click.echo(describe(loaded), nl=False)
        return
    raise SystemExit(_run(loaded, settings, quiet, recover_vhosts))


def _run(loaded: Loaded, settings: Callable[[], Loaded], quiet: bool, recover_vhosts: bool) -> int:
    config = loaded.config
    logs = Logs(config.log.level, config.log.format, environment=os.environ)
    log = logging.getLogger("basaltmq.serve")
    log.info("Basalt %s starting, process %d, data directory %s", __version__, os.getpid(), config.data_dir.absolute())
    for note in loaded.notes:
        log.warning("%s", note)

    def ready(config: Config, ports: Mapping[str, int]) -> None:
        if not quiet and config.log.format == "text" and "JOURNAL_STREAM" not in os.environ:
            # A closed stdout must not stop the broker.
            with contextlib.suppress(OSError):
                click.echo(welcome(config, ports, __version__))

    async def main() -> int:
        serving = Serving(loaded, settings, logs, os.environ, recover_vhosts=recover_vhosts)
        await serving.run(ready)
        return serving.code

    try:
        return _loop_runner(main)
    except BasaltError as error:
        log.debug("the broker failed to start", exc_info=True)
        _print_error(error)
        return exit_code(error)
    except PermissionError as error:
        click.echo(
            f"error [permission]: {error.filename}: {error.strerror}; make it accessible to the broker's user", err=True
        )
        return NO_PERMISSION
    except Exception:
        log.exception("the broker failed")
        return INTERNAL
    finally:
        logs.close()


def _loop_runner(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    sys.setswitchinterval(SWITCH_S)
    try:
        import uvloop
    except ImportError:
        logging.getLogger("basaltmq.serve").warning(
            "uvloop is not installed: using asyncio's event loop at about half the throughput; %s",
            install_hint("server"),
        )
        runner = asyncio.Runner()
    else:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        return runner.run(main())


def _print_error(error: BasaltError) -> None:
    sys.stdout.flush()
    click.echo(f"error [{error.code}]: {error}", err=True)
