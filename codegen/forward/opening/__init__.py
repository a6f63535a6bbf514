"""Decides which calls are printed, where values are converted, and where stages are cut."""
