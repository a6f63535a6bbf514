"""Expressions, literals, names and lines: printed code before anyone knows of ops."""
