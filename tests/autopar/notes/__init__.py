"""Tests of autopar/notes."""
