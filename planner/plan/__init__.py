"""The plan: what was asked, what was chosen, what it costs, and the proof of the choice."""
