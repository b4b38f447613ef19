"""Settings of the server and where they come from."""
