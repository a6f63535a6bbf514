"""Tests of the description of machines."""
