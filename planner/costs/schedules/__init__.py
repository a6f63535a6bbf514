"""Turns a pipeline schedule into orders of actions, their times, and what is in flight."""
