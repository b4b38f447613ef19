"""No function, class or constant that only tests use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.style.module_graph import modules

PUBLIC = ("basaltmq.embedded", "basaltmq.client", "pyspark_basalt")
"""Packages whose methods users or Spark call."""

GENERATED = "basaltmq.wire"

WITHOUT_PRODUCT_USE: dict[str, str] = {
    "BasicDeliver": "the table of AMQP methods registers it",
    "emit": "logging calls it",
    "eof_received": "asyncio calls it",
    "NORMAL_DISCONNECTION": "the name of code 0 in DISCONNECT",
    "GRANTED_QOS_0": "the name of code 0 in SUBACK",
    "buffered_bytes": "tests check the memory limit of the MQTT decoder with it",
    "open_files": "tests check the limit of open files with it",
    "save_link": "the link store of SPEC A8; AMQP 1.0 writes the rows in the batch of a turn with `row_of`",
    "delete_link": "the link store of SPEC A8; AMQP 1.0 writes the rows in the batch of a turn with `deleted_row`",
    "PreferenceStore": "the console will use it",
    "update_or_create": "the console will use it",
    "create_shard": "the storage adapter of SPEC B2; topics create many shards in one batch with `place`",
    "delete_shard": "the storage adapter of SPEC B2; topics delete many shards in one batch with `plan_delete`",
    "list_shard": "the storage adapter of SPEC B2",
    "get_offset_by_group": "the storage adapter of SPEC B2",
    "commit_offset": "the storage adapter of SPEC B2",
    "dropwhile": "the backing queue of SPEC E1",
    "timed_message_key": "the counterpart of `decode_timed_message_key`; the product derives the key with `timed_of`",
    "encode_request": "the client side of the Kafka codec, for tests and fuzzers",
    "decode_response": "the client side of the Kafka codec, for tests and fuzzers",
}
"""Names that the product does not use, and why they exist."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def uses(tree: ast.AST) -> Iterator[str]:
    """Identifiers that the code reads, calls or names in a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def definitions(tree: ast.Module, *, is_public: bool) -> Iterator[str]:
    """Functions, classes and constants of a module, without those that a decorator registers."""
    for node in ast.walk(tree):
        if isinstance(node, Definition) and not node.name.startswith("__"):
            registered = any(not _is_plain(each) for each in node.decorator_list)
            if not registered and not (is_public and not node.name.startswith("_")):
                yield node.name
    for statement in tree.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def _is_plain(decorator: ast.expr) -> bool:
    """Whether callers use the decorated function by its name."""
    name = ast.unparse(decorator).split("(")[0]
    return name in {"property", "staticmethod", "classmethod", "contextmanager", "dataclass", "lru_cache", "cache"}


def unused(trees: dict[str, ast.Module]) -> set[str]:
    used = {name for tree in trees.values() for name in uses(tree)}
    return {
        name
        for module, tree in trees.items()
        for name in definitions(tree, is_public=module.startswith(PUBLIC))
        if name not in used
    }


def parse(paths: dict[str, Path]) -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text()) for module, path in paths.items() if not module.startswith(GENERATED)}


def test_the_product_uses_every_function_class_and_constant() -> None:
    assert unused(parse(modules())) == set(WITHOUT_PRODUCT_USE), "delete the code, or correct the list of exceptions"


def test_an_unused_name_is_found() -> None:
    code = """
from typing import Final
A: Final = 1
B: Final = 2
class C:
    def used(self): return A
    def unused(self): return 0
    @property
    def also_unused(self): return 0
    @command.option("x")
    def registered(self): ...
C().used()
"""
    assert unused({"basaltmq.queues.x": ast.parse(code)}) == {"B", "unused", "also_unused"}
    assert unused({"basaltmq.client.x": ast.parse(code)}) == {"B"}
