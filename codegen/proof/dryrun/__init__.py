"""Runs a script's step without computing, to find its memory and its messages."""
