"""Infers by unification which axis every dim of every tensor is, and names the axes."""
