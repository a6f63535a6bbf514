"""Describes the machines of a plan: their devices, and the links between any two devices."""
