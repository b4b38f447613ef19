"""Leases: which consumer holds which messages, until when."""
