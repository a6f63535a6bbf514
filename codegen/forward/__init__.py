"""Turns the ops of a plan's graph into readable PyTorch: the classes that a split changes."""
