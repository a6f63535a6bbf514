"""Bounds a step from below before it is solved, each sharper and dearer than the one before."""
