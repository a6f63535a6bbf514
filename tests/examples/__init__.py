"""The examples, on small models that tests leave on the disk."""
