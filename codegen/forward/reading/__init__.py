"""Reads plan, graph and the user's classes: what printing has to know."""
