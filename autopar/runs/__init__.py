"""Runs a training in its own folder, analyses its metrics, and plans it again."""
