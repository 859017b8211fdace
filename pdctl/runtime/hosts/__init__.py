"""Where things run: one interface, one file per kind of host."""
