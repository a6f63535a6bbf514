"""Turns the file that a user wrote into functions that build the model, its faults told as ours."""
