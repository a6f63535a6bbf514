"""Stages: which consecutive layers are on which rank, and their recompute modes."""
