"""Metrics, health checks, rates and the overview."""
