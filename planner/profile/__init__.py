"""Measures ops, dispatch and links on the devices at hand; an edge: it runs torch for real."""
