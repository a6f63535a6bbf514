"""Tests of autopar/pages."""
