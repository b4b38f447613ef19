"""Memory and disk space: limits, alarms that block publishers, and space reclamation."""
