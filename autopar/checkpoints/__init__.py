"""Checkpoints looked at without a training: listed, compared, exported."""
