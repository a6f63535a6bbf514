"""Tests of the plan and its search."""
