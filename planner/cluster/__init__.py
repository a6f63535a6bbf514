"""Describes the machines of a plan: devices, links, and who reaches whom over which of them."""
