"""The version of autopar, written into plans and scripts."""

__version__ = "0.2.0"
