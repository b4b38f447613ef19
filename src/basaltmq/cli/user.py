"""`basalt user` and `basalt permission`: users and their permissions."""

from __future__ import annotations

import sys
from shlex import quote

import click

from basaltmq.cli.broker_options import with_api
from basaltmq.cli.options import as_json, vhost_option
from basaltmq.cli.output import Column, show_objects, titled
from basaltmq.http_client import HttpClient, path

TAGS = ("administrator", "monitoring", "policymaker", "management")


@click.group()
def user() -> None:
    """Manage users of a running broker."""


@user.command("list")
@as_json
@with_api
def list_users(api: HttpClient, as_json: bool) -> None:
    """List users with their tags."""
    columns: dict[str, Column] = {"user": "name", "tags": lambda each: ", ".join(each["tags"])}
    show_objects(list(api.pages(path("users"))), columns, as_json=as_json, empty="no users")


def _read_password(name: str) -> str:
    if sys.stdin.isatty():
        return str(click.prompt(f"Password for {name}", hide_input=True, confirmation_prompt=True, err=True))
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise click.UsageError("pass the password on the first line of stdin, or use --no-password")
    return line


tags_option = click.option("--tag", "tags", multiple=True, help=f"Tag: {', '.join(TAGS)}. Repeat for several.")


@user.command()
@click.argument("name")
@tags_option
@click.option("--no-password", is_flag=True, help="Allow login only with a client certificate.")
@with_api
def create(api: HttpClient, name: str, tags: tuple[str, ...], no_password: bool) -> None:
    """Create a user. The password comes from a prompt, or from the first line of stdin."""
    body: dict[str, object] = {"tags": list(tags)}
    body |= {"password_hash": ""} if no_password else {"password": _read_password(name)}
    api.put(path("users", name), body)
    click.echo(f"user {name} created; grant access with: basalt permission set {quote(name)} --vhost /")


@user.command()
@click.argument("name")
@with_api
def password(api: HttpClient, name: str) -> None:
    """Change a user's password. It comes from a prompt, or from the first line of stdin."""
    tags = api.get(path("users", name))["tags"]
    api.put(path("users", name), {"password": _read_password(name), "tags": tags})
    click.echo(f"password of user {name} changed")


@user.command()
@click.argument("name")
@click.option(
    "--mechanism",
    type=click.Choice(["SCRAM-SHA-256", "SCRAM-SHA-512"]),
    default="SCRAM-SHA-256",
    show_default=True,
    help="Mechanism of the credential.",
)
@click.option("--remove", is_flag=True, help="Remove the credential instead.")
@with_api
def scram(api: HttpClient, name: str, mechanism: str, remove: bool) -> None:
    """Allow a user to log in with SCRAM over Kafka and MQTT 5.0.

    The password comes from a prompt, or from the first line of stdin. A later password change removes the credential.
    """
    if remove:
        api.delete(path("users", name, "scram", mechanism))
        click.echo(f"{mechanism} of user {name} removed")
        return
    api.put(path("users", name, "scram", mechanism), {"password": _read_password(name)})
    click.echo(f"user {name} can log in with {mechanism}")


@user.command()
@click.argument("name")
@click.argument("tags", nargs=-1, metavar="[TAG]...")
@with_api
def tags(api: HttpClient, name: str, tags: tuple[str, ...]) -> None:
    """Replace the tags of a user."""
    api.put(path("users", name, "tags"), {"tags": list(tags)})
    click.echo(f"user {name} has tags: {', '.join(tags) or 'none'}")


@user.command()
@click.argument("name")
@with_api
def delete(api: HttpClient, name: str) -> None:
    """Delete a user and all its permissions."""
    api.delete(path("users", name))
    click.echo(f"user {name} deleted")


@click.group()
def permission() -> None:
    """Manage permissions of users of a running broker.

    A permission has patterns of the names that a user may configure, write and read in a virtual host.
    """


@permission.command("list")
@click.option("--topics", is_flag=True, help="List topic permissions, which restrict routing keys, instead.")
@as_json
@with_api
def list_permissions(api: HttpClient, topics: bool, as_json: bool) -> None:
    """List permissions of all users."""
    found = list(api.pages(path("topic-permissions" if topics else "permissions")))
    columns = titled("user", "vhost", "exchange" if topics else "configure", "write", "read")
    show_objects(found, columns, as_json=as_json, empty="no permissions")


@permission.command("set")
@click.argument("user_name", metavar="USER")
@vhost_option
@click.option("--configure", default=".*", show_default=True, help="Names to declare and delete.")
@click.option("--write", default=".*", show_default=True, help="Names to publish to.")
@click.option("--read", default=".*", show_default=True, help="Names to consume from.")
@click.option("--exchange", help="Set the topic permission for routing keys of this exchange (write and read only).")
@with_api
def set_permission(
    api: HttpClient, user_name: str, vhost: str, configure: str, write: str, read: str, exchange: str | None
) -> None:
    """Grant a user access to a virtual host. The patterns are regular expressions on names."""
    if exchange is not None:
        api.put(path("topic-permissions", vhost, user_name), {"exchange": exchange, "write": write, "read": read})
    else:
        api.put(path("permissions", vhost, user_name), {"configure": configure, "write": write, "read": read})
    click.echo(f"user {user_name} in vhost {vhost}: permissions set")


@permission.command("clear")
@click.argument("user_name", metavar="USER")
@vhost_option
@click.option("--topics", is_flag=True, help="Remove the topic permissions instead.")
@with_api
def clear_permission(api: HttpClient, user_name: str, vhost: str, topics: bool) -> None:
    """Remove a user's permissions in a virtual host."""
    api.delete(path("topic-permissions" if topics else "permissions", vhost, user_name))
    click.echo(f"user {user_name} in vhost {vhost}: permissions removed")
