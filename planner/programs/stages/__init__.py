"""The stage program: which layers each pipeline stage runs, and how."""
