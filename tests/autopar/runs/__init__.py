"""Tests of autopar/runs."""
