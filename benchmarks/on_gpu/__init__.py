"""One command that checks emitted scripts on one GPU, and times steps and kernels."""
