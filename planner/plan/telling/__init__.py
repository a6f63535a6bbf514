"""Describes plans in words and numbers that several pages use."""
