"""Tests of the validation against published runs."""
