"""File operations through Hadoop's file systems, for every storage that Spark can write to.

Paths are strings that Spark accepts: local paths or URIs. A rename is atomic on a local disk, and a copy on an object
store. Correctness depends only on the manifests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from pyspark.sql import SparkSession

from basaltmq.errors import CorruptionError

T = TypeVar("T")


class Files:
    def __init__(self, spark: SparkSession, root: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm
        self._settings = context._jsc.hadoopConfiguration()
        self._system = self._path(root).getFileSystem(self._settings)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(path)

    def exists(self, path: str) -> bool:
        return bool(self._system.exists(self._path(path)))

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a directory, or none if it does not exist."""
        if not self.exists(path):
            return []
        return sorted(str(status.getPath().getName()) for status in self._system.listStatus(self._path(path)))

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        """Yield (relative path, size in bytes) of all files below a directory."""
        if not self.exists(path):
            return
        base = str(self._system.getFileStatus(self._path(path)).getPath().toString()) + "/"
        found = self._system.listFiles(self._path(path), True)
        while found.hasNext():
            status = found.next()
            yield str(status.getPath().toString()).removeprefix(base), int(status.getLen())

    def rename(self, source: str, target: str) -> None:
        self._system.mkdirs(self._path(target).getParent())
        if not self._system.rename(self._path(source), self._path(target)):
            raise OSError(
                f"{source} cannot be renamed to {target}; check the permissions, and that the target does not exist"
            )

    def delete(self, path: str) -> None:
        self._system.delete(self._path(path), True)

    def read(self, path: str) -> bytes:
        stream = self._system.open(self._path(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def read_plan(self, path: str, decode: Callable[[bytes], T]) -> T | None:
        """Return the JSON that a job stored in its checkpoint; None at its first start."""
        if not self.exists(path):
            return None
        try:
            return decode(self.read(path))
        except msgspec.DecodeError as error:
            raise CorruptionError(f"{path} cannot be read: {error}; start with another checkpoint") from None

    def parquet_range(self, path: str, column: str) -> tuple[int, int, int]:
        """Return (minimum, maximum, rows) of a column of a Parquet file, from its footer."""
        parquet = self._jvm.org.apache.parquet.hadoop
        reader = parquet.ParquetFileReader.open(parquet.util.HadoopInputFile.fromPath(self._path(path), self._settings))
        least: list[int] = []
        largest: list[int] = []
        rows = 0
        try:
            for block in reader.getFooter().getBlocks():
                rows += block.getRowCount()
                for chunk in block.getColumns():
                    numbers = chunk.getStatistics()
                    if chunk.getPath().toDotString() == column and numbers.hasNonNullValue():
                        least.append(numbers.getMin())
                        largest.append(numbers.getMax())
        finally:
            reader.close()
        if not least:
            raise CorruptionError(f"the footer of {path} has no statistics of column {column!r}")
        return min(least), max(largest), rows

    def write_json(self, path: str, content: msgspec.Struct) -> None:
        self.write(path, msgspec.json.format(msgspec.json.encode(content), indent=1))

    def write(self, path: str, content: bytes) -> None:
        """Write a file so that its name appears only when it is complete and durable."""
        hidden = f"{path}.partial"
        stream = self._system.create(self._path(hidden), True)
        try:
            stream.write(content)
            stream.hsync()
        finally:
            stream.close()
        self.delete(path)
        self.rename(hidden, path)
