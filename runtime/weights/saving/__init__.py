"""Predicts which files a model's `save_pretrained` writes, and reads weights from such files."""
