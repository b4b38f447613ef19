"""Files of an archive, wherever Spark can write: a thin face of Hadoop's file systems.

One object per job. Paths are texts in the form Spark takes (a local path, or a URI). Rename is what makes things
visible; on a disk it is atomic, on an object store a copy, and the manifests are what counts either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import SparkSession


class Files:
    """File operations of a Spark session."""

    def __init__(self, spark: SparkSession, root: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm
        self._system = self._path(root).getFileSystem(context._jsc.hadoopConfiguration())

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
