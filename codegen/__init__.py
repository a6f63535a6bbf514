"""Turns a plan into the source text of a training script."""
