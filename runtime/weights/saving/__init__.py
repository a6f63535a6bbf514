"""Predicts without values what a model's `save_pretrained` writes, and reads it back."""
