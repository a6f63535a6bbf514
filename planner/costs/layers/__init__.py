"""Turns a layer in its layouts into its cost on one rank."""
