"""`basalt doctor`: checks whether this machine and these settings are suitable for the broker."""

from __future__ import annotations

from collections.abc import Callable

import click

from basaltmq.broker.config.sources import Loaded
from basaltmq.cli.doctor.checks import CHECKS, Finding, State
from basaltmq.cli.doctor.data import data
from basaltmq.cli.options import as_json
from basaltmq.cli.output import FINDINGS, show
from basaltmq.cli.server.settings import with_settings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_settings
@click.option(
    "--verify",
    is_flag=True,
    help="Also read every data file and verify its checksums. Takes as long as reading the disk.",
)
@as_json
def doctor(settings: Callable[[], Loaded], verify: bool, as_json: bool) -> None:
    """Check the machine, the settings and the data directory.

    It covers Python, packages, ports, limits, memory, disk, clock and certificates.

    The exit code is 2 if a check fails, and 0 if there are only warnings.
    """
    loaded = settings()
    found = [finding for check in CHECKS for finding in check(loaded.config)]
    found += data(loaded.config, verify=verify)
    found += [Finding("settings", State.WARN, note, "correct or remove the setting") for note in loaded.notes]
    if as_json:
        show([finding._asdict() for finding in found], as_json=True)
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            click.echo(f"{finding.state.value:<4}  {finding.check:<{width}}  {finding.detail}")
            if finding.advice:
                click.echo(f"      {'':<{width}}  -> {finding.advice}")
        count = {state: sum(finding.state is state for finding in found) for state in State}
        click.echo(f"\n{count[State.OK]} ok, {count[State.WARN]} warnings, {count[State.FAIL]} failed")
    if any(finding.state is State.FAIL for finding in found):
        raise SystemExit(FINDINGS)
