"""Lower bounds of a step before it is solved, each sharper and slower than the one before."""
