"""`basalt user` and `basalt permission`: who may come in, and what they may do there."""

from __future__ import annotations

import sys

import click

from basaltmq.cli.output import show
from basaltmq.http_client import ApiClient, path, with_api

TAGS = ("administrator", "monitoring", "policymaker", "management")

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
vhost_option = click.option("--vhost", default="/", show_default=True)


@click.group()
def user() -> None:
    """Users of a running broker."""


@user.command("list")
@as_json
@with_api
def list_users(api: ApiClient, as_json: bool) -> None:
    """List users with their tags."""
    found = list(api.pages(path("users")))
    rows = found if as_json else [{"user": each["name"], "tags": ", ".join(each["tags"])} for each in found]
    show(rows, as_json=as_json, empty="no users")


def _asked_password(name: str) -> str:
    if sys.stdin.isatty():
        return str(click.prompt(f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True))
    said = sys.stdin.readline().rstrip("\r\n")
    if not said:
        raise click.UsageError("give the password on the first line of stdin, or --no-password")
    return said


tags_option = click.option(
    "--tag", "tags", multiple=True, help=f"Any of {', '.join(TAGS)}; may be given several times."
)


@user.command()
@click.argument("name")
@tags_option
@click.option("--no-password", is_flag=True, help="Let in by a client certificate only.")
@with_api
def create(api: ApiClient, name: str, tags: tuple[str, ...], no_password: bool) -> None:
    """Make a user. The password is asked for, or is the first line of stdin."""
    body: dict[str, object] = {"tags": list(tags)}
    body |= {"password_hash": ""} if no_password else {"password": _asked_password(name)}
    api.put(path("users", name), body)
    click.echo(f"user {name} is there; let them in with: basalt permission set {name} --vhost /")


@user.command()
@click.argument("name")
@with_api
def password(api: ApiClient, name: str) -> None:
    """Give a user another password: asked for, or the first line of stdin."""
    tags = api.get(path("users", name))["tags"]
    api.put(path("users", name), {"password": _asked_password(name), "tags": tags})
    click.echo(f"user {name} has another password")


@user.command()
@click.argument("name")
@click.argument("tags", nargs=-1, metavar="[TAG]...")
@with_api
def tags(api: ApiClient, name: str, tags: tuple[str, ...]) -> None:
    """Give a user these tags and no others."""
    api.put(path("users", name, "tags"), {"tags": list(tags)})
    click.echo(f"user {name} has tags: {', '.join(tags) or 'none'}")


@user.command()
@click.argument("name")
@with_api
def delete(api: ApiClient, name: str) -> None:
    """Delete a user with all permissions."""
    api.delete(path("users", name))
    click.echo(f"user {name} deleted")


@click.group()
def permission() -> None:
    """What users may do in virtual hosts: patterns of names they may configure, write and read."""


@permission.command("list")
@click.option("--topics", is_flag=True, help="Those on routing keys of topic exchanges instead.")
@as_json
@with_api
def list_permissions(api: ApiClient, topics: bool, as_json: bool) -> None:
    """List permissions of all users."""
    found = list(api.pages(path("topic-permissions" if topics else "permissions")))
    columns = ("user", "vhost", *(("exchange",) if topics else ("configure",)), "write", "read")
    rows = found if as_json else [{column: each[column] for column in columns} for each in found]
    show(rows, as_json=as_json, empty="no permissions")


@permission.command("set")
@click.argument("user_name", metavar="USER")
@vhost_option
@click.option("--configure", default=".*", show_default=True)
@click.option("--write", default=".*", show_default=True)
@click.option("--read", default=".*", show_default=True)
@click.option("--exchange", help="On routing keys of this topic exchange (write and read only).")
@with_api
def set_permission(
    api: ApiClient, user_name: str, vhost: str, configure: str, write: str, read: str, exchange: str | None
) -> None:
    """Let a user in, and say what they may do: regular expressions over names."""
    if exchange is not None:
        api.put(path("topic-permissions", vhost, user_name), {"exchange": exchange, "write": write, "read": read})
    else:
        api.put(path("permissions", vhost, user_name), {"configure": configure, "write": write, "read": read})
    click.echo(f"user {user_name} in vhost {vhost}: done")


@permission.command("clear")
@click.argument("user_name", metavar="USER")
@vhost_option
@click.option("--topics", is_flag=True, help="Those on routing keys instead.")
@with_api
def clear_permission(api: ApiClient, user_name: str, vhost: str, topics: bool) -> None:
    """Take a user's permissions in a virtual host away."""
    api.delete(path("topic-permissions" if topics else "permissions", vhost, user_name))
    click.echo(f"user {user_name} in vhost {vhost}: permissions taken away")
