"""Turns the ops of a graph into seconds and bytes: the formulas applied to what an op is."""
