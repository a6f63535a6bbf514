"""autopar plans how to split the training of a PyTorch model, and writes the script."""

__version__ = "0.1.0"
