"""MQTT on the wire: packets, properties, reason codes, topic names and filters. No I/O."""
