"""Prices and solves one arrangement: what the programs are asked, and what comes back."""
