"""What a model's `save_pretrained` writes: known before it writes, and read back."""
