"""Model files in the form that users write."""
