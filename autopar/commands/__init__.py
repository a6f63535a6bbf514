"""One thin module per command: read the arguments, call the planner, print."""
