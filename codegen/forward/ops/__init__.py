"""Turns one op into what a person would write for it, whole or split."""
