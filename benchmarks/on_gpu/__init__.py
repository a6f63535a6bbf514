"""One command for one GPU: what emitted scripts do there, and what kernels take."""
