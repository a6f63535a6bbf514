"""Programs that measure autopar's speed, accuracy and correctness, and write their results."""
