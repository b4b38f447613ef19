"""`basalt doctor`: is this machine, with these settings, a good place for the broker?"""

from __future__ import annotations

from collections.abc import Callable

import click

from basaltmq.broker.config.sources import Loaded
from basaltmq.cli.doctor.checks import CHECKS, Finding, State
from basaltmq.cli.doctor.data import data
from basaltmq.cli.output import show
from basaltmq.cli.server.settings import with_settings

FINDINGS = 2
"""Exit code when something must be mended first."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@with_settings
@click.option("--verify", is_flag=True, help="Read every file of the data back; takes as long as the disk does.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(settings: Callable[[], Loaded], verify: bool, as_json: bool) -> None:
    """Check Python, packages, ports, limits, memory, disk, clock, certificates and the data directory.

    Exit code 2 if anything must be mended before the broker can work well; warnings alone leave it 0.
    """
    loaded = settings()
    found = [finding for check in CHECKS for finding in check(loaded.config)]
    found += data(loaded.config, verify=verify)
    found += [Finding("settings", State.WARN, note, "correct or remove it") for note in loaded.notes]
    if as_json:
        show([finding._asdict() for finding in found], as_json=True)
    else:
        width = max(len(finding.check) for finding in found)
        for finding in found:
            click.echo(f"{finding.state.value:<4}  {finding.check:<{width}}  {finding.said}")
            if finding.advice:
                click.echo(f"      {'':<{width}}  -> {finding.advice}")
        count = {state: sum(finding.state is state for finding in found) for state in State}
        click.echo(f"\n{count[State.OK]} ok, {count[State.WARN]} to look at, {count[State.FAIL]} to mend")
    if any(finding.state is State.FAIL for finding in found):
        raise SystemExit(FINDINGS)
