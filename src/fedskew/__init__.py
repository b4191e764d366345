"""Federated learning when clients hold different labels."""

__version__ = "0.1.0"
