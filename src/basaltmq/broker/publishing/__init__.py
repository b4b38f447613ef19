"""The tick of all protocols: routes messages, writes one batch per turn of the loop, confirms after the sync."""
