"""The integer programs that choose a plan and prove the choice."""
