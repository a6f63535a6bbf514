"""Tests of the printed forwards."""
