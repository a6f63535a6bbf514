"""Turns a plan into its script's view, and that into checked text."""
