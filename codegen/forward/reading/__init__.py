"""Collects what forwards are printed from: the plan, the graph and the user's classes."""
