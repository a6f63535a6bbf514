"""Turns a plan into plan.json and back, and refuses what is not a sound plan."""
