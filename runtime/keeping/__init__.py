"""Keeps what a training has made: its weights as one file, its whole state to go on from."""
