"""Options that several commands share."""

from __future__ import annotations

import click

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
vhost_option = click.option("--vhost", default="/", show_default=True, help="Virtual host.")
family_option = click.option("--family", help="Column family.  [default: all]")
