"""Stages: which consecutive layers go where, and how each is run."""
