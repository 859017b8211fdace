"""This machine: its processes, its ports, where pdctl keeps things on it."""
