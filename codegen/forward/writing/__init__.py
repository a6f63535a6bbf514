"""Turns a body into source lines: loops, names, and values inlined where they are used."""
