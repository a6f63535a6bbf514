"""Turns a pipeline schedule into orders of actions, their times, and microbatches in flight."""
