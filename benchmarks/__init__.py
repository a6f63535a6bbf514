"""Measurements: every one prints ratios or residuals from one run."""
