"""Local transactions and XA branches over queues."""
