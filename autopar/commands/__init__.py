"""The commands, one thin module each: they read arguments, call the planner, and print."""
