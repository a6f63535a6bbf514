"""Tests of the pages in docs/."""
