"""Turns a model and a cluster into a plan; imports none of the other parts."""
