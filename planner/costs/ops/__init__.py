"""Turns the ops of a graph into seconds and bytes, with a formula for each kind of op."""
