"""Basalt for Spark: `spark.read.format("basalt")`, batch and streaming, in Arrow all the way.

Spark finds `DefaultSource` by the name of this package; nothing needs to be registered. Only `source` and what is below
it know pyspark. The store is read through `StreamView`, beside whoever has it open for writing, or over the network.
"""

from pyspark_basalt.source import BasaltDataSource as DefaultSource

__all__ = ["DefaultSource"]
