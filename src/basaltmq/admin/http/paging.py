"""Lists for RabbitMQ's tools: complete or by page, filtered by name, sorted, with selected columns.

Without `page` the complete list is returned, as these tools expect. Building many items yields to the event loop.
A filter is a substring, not a regular expression, because a malicious expression could block the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Final, TypeVar

from basaltmq.admin.http.message import HttpError
from basaltmq.admin.http.routes import Call
from basaltmq.broker.scheduling.turns import Turns, in_turns

PAGE_ITEMS: Final = 100
PAGE_ITEMS_MAX: Final = 500
"""RabbitMQ's limit. Larger pages would hold the loop for too long."""

Key = TypeVar("Key")


async def listing(
    call: Call, names: Iterable[tuple[str, Key]], make: Callable[[Key], dict[str, Any] | None], *, sort: str = "name"
) -> Any:
    """Return the items of a list request. `names` has (name, key) of all items, and `make` builds an item from its key.

    Sorted by name, only the items of the page are built. Sorted by another field, all items are built, but only the
    values of the field are kept. `make` returns None for an item that no longer exists.
    """
    wanted = call.query.get("name", "")
    if wanted and call.flag("use_regex"):
        raise HttpError(400, "use_regex is not supported; send a part of the name")
    everything = list(names)
    chosen = [each for each in everything if wanted in each[0]] if wanted else everything
    field = call.query.get("sort") or sort
    if field == sort:
        chosen.sort(key=lambda each: each[0], reverse=call.flag("sort_reverse"))
    else:
        chosen = await _sorted(call, field, chosen, make)
    if "page" not in call.query:
        return await _made(chosen, make)
    page = call.number("page", 1, low=1)
    size = call.number("page_size", PAGE_ITEMS, low=1, high=PAGE_ITEMS_MAX)
    pages = max(1, -(-len(chosen) // size))
    if page > pages:
        raise HttpError(400, f"there is no page {page}; the last is {pages}", code="page_out_of_range")
    selected = slice((page - 1) * size, page * size)
    items = await _made(chosen[selected], make)
    return {
        "filtered_count": len(chosen),
        "item_count": len(items),
        "items": items,
        "page": page,
        "page_count": pages,
        "page_size": size,
        "total_count": len(everything),
    }


async def _made(chosen: list[tuple[str, Key]], make: Callable[[Key], dict[str, Any] | None]) -> list[dict[str, Any]]:
    items = []
    turns = Turns()
    for _, key in chosen:
        item = make(key)
        if item is not None:
            items.append(item)
        await turns.yield_if_due()
    return items


async def _sorted(
    call: Call, field: str, chosen: list[tuple[str, Key]], make: Callable[[Key], dict[str, Any] | None]
) -> list[tuple[str, Key]]:
    """Return the items that exist, sorted by a field."""

    def ranked(each: tuple[str, Key]) -> tuple[tuple[int, Any], tuple[str, Key]] | None:
        item = make(each[1])
        if item is None:
            return None
        value = _value(item, field)
        if isinstance(value, int | float):
            return (1, value), each
        return ((0, "") if value is None else (2, str(value))), each

    found = [each for each in await in_turns(chosen, ranked) if each is not None]
    found.sort(key=itemgetter(0), reverse=call.flag("sort_reverse"))
    return [each for _, each in found]


def only_columns(call: Call, response: Any) -> Any:
    """Return a response with only the requested fields, of an object or of every item of a list or page."""
    asked = [column for column in call.query.get("columns", "").split(",") if column]
    if not asked:
        return response
    if isinstance(response, list):
        return [_only(item, asked) if isinstance(item, dict) else item for item in response]
    if not isinstance(response, dict):
        return response
    if "page" in call.query and "items" in response:
        return {**response, "items": only_columns(call, response["items"])}
    return _only(response, asked)


def _only(item: dict[str, Any], columns: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for column in columns:
        head, _, rest = column.partition(".")
        if head not in item:
            continue
        if rest and isinstance(item[head], dict):
            kept.setdefault(head, {}).update(_only(item[head], [rest]))
        else:
            kept[head] = item[head]
    return kept


def _value(item: Any, field: str) -> Any:
    for part in field.split("."):
        item = item.get(part) if isinstance(item, dict) else None
    return item
