"""Turns one layer in its layouts into what it costs one rank."""
