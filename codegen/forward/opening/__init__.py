"""Decides what gets printed code, where conversions are, and where stages are cut."""
