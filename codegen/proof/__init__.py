"""Runs scripts and plain PyTorch side by side, or without computing, and compares."""
