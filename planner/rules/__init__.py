"""The table of ops: the dims that may be split, FLOPs, and tensors saved for the backward."""
