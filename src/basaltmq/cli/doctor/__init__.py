"""`basalt doctor`: checks of the machine, the settings and the data directory."""
