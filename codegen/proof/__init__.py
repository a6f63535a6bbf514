"""Compares scripts with plain PyTorch, and runs the step of one rank without computing."""
