"""Files of an archive as frames, and staged files put where they belong; for every job that touches an archive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StringType, StructField, StructType

from basaltmq.pipeline.archive.manifest import ArchivedFile
from basaltmq.pipeline.files import Files

FOLDERS: Final = ("topic", "day")


def read_archived(spark: SparkSession, root: str, paths: Sequence[str], *, skip_damaged: bool = False) -> DataFrame:
    """The records of files given by their paths in the archive; of damaged ones, if asked, what comes before."""
    full = [f"{root}/{path}" for path in paths]
    options = {"basePath": root, "mergeSchema": "true", "ignoreCorruptFiles": str(skip_damaged).lower()}
    found = spark.read.options(**options).parquet(*full).schema
    # Spark guesses types from the names of folders, and takes a topic called 007 for a number.
    named = StructType([StructField(each.name, StringType()) if each.name in FOLDERS else each for each in found])
    return spark.read.options(**options).schema(named).parquet(*full)


def path_within(file: str, *, levels: int) -> str:
    """The last parts of what Spark calls the name of a file.

    The name alone will not do: a task that writes to several folders gives its files there one name.
    """
    return "/".join(unquote(file).split("/")[-levels:])


def settle(files: Files, root: str, staged: str, batch: int) -> list[ArchivedFile]:
    """Move the files of a batch to where they belong, under names that say what is in them, which footers tell."""
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
