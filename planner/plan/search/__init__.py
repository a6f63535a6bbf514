"""Searches the arrangements, best first; returns a plan with its proof, or why there is none."""
