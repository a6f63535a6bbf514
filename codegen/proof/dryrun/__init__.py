"""A script's step without computing: its memory and its messages."""
