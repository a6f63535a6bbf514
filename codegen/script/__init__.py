"""Turns a plan into the view of its script, and that into checked text."""
