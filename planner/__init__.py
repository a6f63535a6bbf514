"""Turns a model and a cluster into a plan; imports the runtime only to build the model."""
