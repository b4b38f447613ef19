"""The Kafka protocol on the wire: schemas, messages, errors."""
