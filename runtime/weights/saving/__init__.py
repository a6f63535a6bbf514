"""What a model's `save_pretrained` writes: predicted without values, and read back."""
