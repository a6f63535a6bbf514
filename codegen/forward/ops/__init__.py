"""Prints one op as a person would write it, whole or split."""
