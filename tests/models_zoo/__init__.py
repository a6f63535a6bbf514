"""Tests of the model files that ship with autopar."""
