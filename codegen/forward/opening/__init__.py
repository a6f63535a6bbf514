"""Decides what gets code of its own, where conversions stand, and where stages are cut."""
