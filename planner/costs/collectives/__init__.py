"""Turns links, groups and bytes into the seconds of collectives and of conversions."""
