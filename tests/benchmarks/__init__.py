"""The benchmarks themselves run."""
