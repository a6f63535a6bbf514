"""A constructor that runs on the meta device, and what its tensors hold, op by op."""
