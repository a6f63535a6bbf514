"""Tests of the axis inference."""
