"""Says what a plan is and why, in words and numbers that pages share."""
