"""The Parquet files of an archive: reading them, moving them into place, and deleting orphans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from basaltmq.pipeline.archive.manifest import ArchivedFile, read_manifests
from basaltmq.pipeline.files import Files

FOLDERS: Final = ("topic", "day")


def read_archived(spark: SparkSession, root: str, paths: Sequence[str], *, skip_damaged: bool = False) -> DataFrame:
    """Return the records of files, given by their paths in the archive.

    With `skip_damaged`, a damaged file yields the records before the damage.
    """
    full = [f"{root}/{path}" for path in paths]
    options = {"basePath": root, "mergeSchema": "true", "ignoreCorruptFiles": str(skip_damaged).lower()}
    found = spark.read.options(**options).parquet(*full).schema
    # Spark infers types from directory names, and would read a topic called 007 as a number.
    named = StructType([StructField(each.name, StringType()) if each.name in FOLDERS else each for each in found])
    return spark.read.options(**options).schema(named).parquet(*full)


def path_within(file: str, *, levels: int) -> str:
    """Return the last `levels` parts of a file path.

    The name alone is ambiguous: a task that writes to several directories uses one file name in all of them.
    """
    return "/".join(unquote(file).split("/")[-levels:])


def move_into_place(files: Files, root: str, staged: str, batch: int) -> list[ArchivedFile]:
    """Rename the staged files of a batch to their final paths. The names contain the offset range from the footers."""
    sizes = {path: size for path, size in files.walk(staged) if path.endswith(".parquet")}
    if not sizes:
        return []
    archived: list[ArchivedFile] = []
    for path, size_bytes in sorted(sizes.items()):
        topic_folder, day_folder, shard_folder, _ = path.split("/")
        first, last, records = files.parquet_range(f"{staged}/{path}", "offset")
        shard = int(shard_folder.partition("=")[2])
        target = f"{topic_folder}/{day_folder}/{batch:06d}-{shard}-{first:012d}-{last:012d}.parquet"
        files.rename(f"{staged}/{path}", f"{root}/{target}")
        topic = unquote(topic_folder.partition("=")[2])
        archived.append(ArchivedFile(target, topic, shard, first, last, records, size_bytes))
    return archived


def delete_orphans(files: Files, root: str) -> None:
    """Delete data files that no manifest names."""
    named = {file.path for manifest in read_manifests(files, root) for file in manifest.files}
    for path, _ in list(files.walk(root)):
        if path.startswith("topic=") and path.endswith(".parquet") and path not in named:
            files.delete(f"{root}/{path}")
