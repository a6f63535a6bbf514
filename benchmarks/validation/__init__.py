"""Checks predictions against tables of published training runs."""
