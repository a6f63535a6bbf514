"""Reads plan, graph and the user's classes for printing."""
