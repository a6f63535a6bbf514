"""Prints forwards of the model's classes that a plan changes, from the ops of their graph."""
