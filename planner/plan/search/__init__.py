"""Searches the arrangements, best first, for the plan and its proof, or why there is none."""
