"""Goes through the arrangements, best first, to the plan and its proof, or to why there is none."""
