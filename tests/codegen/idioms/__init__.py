"""Everyday idioms of model files, and the loop of one device that they are compared with."""
