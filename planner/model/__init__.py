"""Turns the user's file into functions that build the model, and reports faults in it."""
