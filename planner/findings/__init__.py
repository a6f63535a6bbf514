"""Finds properties of a model that restrict plans: mixed rows, means, writes, optimizers."""
