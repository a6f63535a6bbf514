"""The plan: the request, the choice, its cost, and the proof of the choice."""
