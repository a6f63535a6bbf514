"""Combines layers, schedule, data parallelism and optimizer into a step's time and memory."""
