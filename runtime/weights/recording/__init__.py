"""Runs a constructor on the meta device, and records its ops."""
