"""Turns a model and a cluster into a plan."""
