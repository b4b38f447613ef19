"""Kafka requests of admin tools: topics, configs, the cluster, SCRAM credentials."""
