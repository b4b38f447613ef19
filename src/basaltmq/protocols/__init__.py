"""Wire protocols. Each has a core without I/O (bytes in, events out) and a thin server around it over the broker."""
