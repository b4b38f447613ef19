"""Documentation of the API: an OpenAPI document and an HTML page, both generated from the route table.

The page has no scripts and loads no resources.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import msgspec

from basaltmq import __version__
from basaltmq.admin.http.routes import Access, Route

PAGING: Final = {
    "page": "Page number, from 1. The response is then an object with `items` and counts instead of a list.",
    "page_size": "Items per page, 1 to 500 (default 100).",
    "name": "Only items whose name contains this text.",
    "sort": "Field to sort by.",
    "sort_reverse": "true: sort in descending order.",
    "columns": "Only these fields, separated by commas.",
}

ARROW_FILE: Final = "application/vnd.apache.arrow.file"
"""Content type of streamed bodies: Arrow IPC files."""

_BINARY: Final = {"type": "string", "format": "binary"}

PAGE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE: Final = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881;--ink:#3b6ea8}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,.path{font-family:ui-monospace,monospace;font-size:.92em}
h2{margin:2.2rem 0 .4rem;border-bottom:1px solid var(--line)}
details{border-bottom:1px solid var(--line);padding:.3rem 0}
summary{cursor:pointer;display:flex;gap:.8rem;align-items:baseline;flex-wrap:wrap}
.method{font:600 .78em ui-monospace,monospace;width:4.2rem;color:var(--ink)}
.who{margin-left:auto;font-size:.8em;opacity:.7}
table{border-collapse:collapse;margin:.4rem 0 .6rem 5rem}td{padding:.1rem .8rem .1rem 0;vertical-align:top}
p.what{margin:.2rem 0 .2rem 5rem}nav a{margin-right:.8rem}a{color:var(--ink)}
"""


def document(routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    types = [route.takes for route in routes if route.takes is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        operation: dict[str, Any] = {
            "operationId": route.identifier,
            "summary": route.summary,
            "tags": [route.group],
            "parameters": _parameters(route),
            "responses": _responses(route),
        }
        if route.access is Access.PUBLIC:
            operation["security"] = []
        else:
            operation["description"] = f"Requires the tag `{route.access.value}`."
        if route.takes is not None:
            operation["requestBody"] = {
                "required": not route.optional_body,
                "content": {"application/json": {"schema": schema_of[id(route.takes)]}},
            }
        if route.sink is not None:
            operation["requestBody"] = {"required": True, "content": {ARROW_FILE: {"schema": _BINARY}}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Basalt administration",
            "version": __version__,
            "description": "Paths and fields follow RabbitMQ's management API where it defines them.",
        },
        "servers": [{"url": "/"}],
        "security": [{"basic": []}],
        "paths": paths,
        "components": {
            "schemas": {**components, "Error": _ERROR},
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
    }


_ERROR: Final = {
    "type": "object",
    "properties": {
        "error": {"type": "string", "description": "Kind of error, by status."},
        "reason": {"type": "string", "description": "What is wrong, and the remedy."},
        "code": {"type": "string", "description": "Basalt's error code, if there is one."},
    },
    "required": ["error", "reason"],
}


def _parameters(route: Route) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
    ]
    for name, meaning in _query(route).items():
        found.append({"name": name, "in": "query", "description": meaning, "schema": {"type": "string"}})
    return found


def _query(route: Route) -> dict[str, str]:
    return {**route.query, **(PAGING if route.paged else {})}


def _responses(route: Route) -> dict[str, Any]:
    refused = {
        "description": "Error",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    return {"2XX": {"description": route.returns or route.summary}, "default": refused}


def page(routes: Sequence[Route], server: str) -> str:
    """Return the HTML page."""
    groups: dict[str, list[Route]] = {}
    for route in routes:
        groups.setdefault(route.group, []).append(route)
    links = " ".join(f'<a href="#{escape(group)}">{escape(group)}</a>' for group in groups)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Basalt administration</title><style>{_STYLE}</style>",
        f"<h1>Basalt administration</h1><p>Version {escape(__version__)}. Authenticate as a user of the broker with "
        "HTTP basic. The tag that each call requires is shown at its right. Percent-encode names in paths: the virtual "
        "host <code>/</code> is <code>%2F</code>. OpenAPI document: <a href=openapi.json>openapi.json</a>.</p>",
        f"<pre><code>curl -u guest:guest {escape(server)}/api/overview</code></pre><nav>{links}</nav>",
    ]
    for group, members in groups.items():
        parts.append(f'<h2 id="{escape(group)}">{escape(group)}</h2>')
        parts += [_entry(route) for route in members]
    return "\n".join(parts)


def _entry(route: Route) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code><td>{escape(meaning)}" for name, meaning in _query(route).items()
    )
    details = f"<p class=what>{escape(route.returns)}" if route.returns else ""
    if rows:
        details += f"<table>{rows}</table>"
    if route.takes is not None:
        details += f"<table>{''.join(_fields(route.takes))}</table>"
    return (
        f"<details><summary><span class=method>{route.method}</span><span class=path>{escape(route.path)}</span>"
        f"<span>{escape(route.summary)}</span><span class=who>{route.access.value}</span></summary>{details}</details>"
    )


def _fields(kind: Any) -> list[str]:
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return ["<tr><td>a JSON object"]
    rows = []
    for each in msgspec.structs.fields(kind):
        shown = getattr(each.type, "__name__", None) or str(each.type)
        need = "required" if each.required else f"default {msgspec.json.encode(_default(each), enc_hook=str).decode()}"
        rows.append(f"<tr><td><code>{escape(each.encode_name)}</code><td>{escape(shown)}<td>{escape(need)}")
    return rows


def _default(each: msgspec.structs.FieldInfo) -> Any:
    return each.default if each.default is not msgspec.NODEFAULT else each.default_factory()
