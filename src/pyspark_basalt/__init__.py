"""Spark data source: `spark.read.format("basalt")`, batch and streaming, with Arrow throughout.

Spark finds `DefaultSource` by the name of this package, so no registration is needed. Only `source.py`, `sink.py` and
`queue_source.py` import pyspark's data source API. The store is read through `StreamView`, beside a process that
writes, or through a broker.
"""

from pyspark_basalt.source import BasaltDataSource as DefaultSource

__all__ = ["DefaultSource"]
