"""Tests of the integer programs."""
