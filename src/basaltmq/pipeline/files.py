"""Files of an archive, wherever Spark can write: a thin face of Hadoop's file systems.

One object per job. Paths are texts in the form Spark takes (a local path, or a URI). Rename is what makes things
visible; on a disk it is atomic, on an object store a copy, and the manifests are what counts either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession

from basaltmq.errors import CorruptionError


class Files:
    """File operations of a Spark session."""

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
        """Names in a directory, sorted; none if there is no such directory."""
        if not self.exists(path):
            return []
        return sorted(str(status.getPath().getName()) for status in self._system.listStatus(self._path(path)))

    def walk(self, path: str) -> Iterator[tuple[str, int]]:
        """Files below a directory as paths relative to it, with their sizes."""
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
            raise OSError(f"{source} cannot be renamed to {target}")

    def delete(self, path: str) -> None:
        self._system.delete(self._path(path), True)

    def read(self, path: str) -> bytes:
        stream = self._system.open(self._path(path))
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def parquet_range(self, path: str, column: str) -> tuple[int, int, int]:
        """The least and the largest number of a column of a Parquet file and how many rows it has, by its footer."""
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
            raise CorruptionError(f"the footer of {path} does not say which numbers of {column!r} it has")
        return min(least), max(largest), rows

    def write(self, path: str, content: bytes) -> None:
        """A whole file, seen under its name only when it is complete and durable."""
        hidden = f"{path}.partial"
        stream = self._system.create(self._path(hidden), True)
        try:
            stream.write(content)
            stream.hsync()
        finally:
            stream.close()
        self.delete(path)
        self.rename(hidden, path)
