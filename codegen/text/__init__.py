"""Expressions, literals, names and lines of printed code, independent of ops."""
