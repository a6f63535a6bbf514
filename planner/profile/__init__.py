"""Measures ops, dispatch and links on this machine's devices by running torch."""
