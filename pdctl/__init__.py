"""Serve one language model with prefill on one engine and decode on another."""

__version__ = "0.1.0"
