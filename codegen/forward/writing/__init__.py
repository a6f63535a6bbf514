"""Turns a body into source lines: loops, names, what stands where it is used."""
