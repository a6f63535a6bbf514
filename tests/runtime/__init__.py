"""Tests of what emitted scripts import."""
