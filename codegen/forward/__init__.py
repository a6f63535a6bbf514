"""Prints readable PyTorch for the classes that a split changes, from the ops of their graph."""
