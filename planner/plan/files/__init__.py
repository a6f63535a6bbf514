"""Turns a plan into plan.json and back, and rejects invalid plans."""
