"""Tests of the tracer: each traces a small model file that it writes."""
