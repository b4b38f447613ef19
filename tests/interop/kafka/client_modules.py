"""Imports Kafka's clients with their warnings suppressed, as untyped modules."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

with warnings.catch_warnings():
    # kafka-python reads its resources in a way Python 3.11 warns of.
    warnings.simplefilter("ignore", DeprecationWarning)
    aiokafka: Any = importlib.import_module("aiokafka")
    confluent_kafka: Any = importlib.import_module("confluent_kafka")
    admin: Any = importlib.import_module("confluent_kafka.admin")
    kafka_python: Any = importlib.import_module("kafka")
