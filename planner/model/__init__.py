"""Turns the user's file into functions that build the model; reports faults in the file."""
