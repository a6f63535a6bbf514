"""Prices and solves one arrangement: the programs' input and their result."""
