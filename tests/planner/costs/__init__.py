"""Tests of the cost formulas."""
