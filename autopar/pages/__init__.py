"""Lays out the output of commands as tables and text."""
