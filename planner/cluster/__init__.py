"""Describes the machines of a plan: devices, links, and the links between any two devices."""
