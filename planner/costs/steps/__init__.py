"""Puts layers, schedule, data parallelism and optimizer together into a step and its memory."""
