"""The version of autopar, which plans and scripts name."""

__version__ = "0.2.0"
