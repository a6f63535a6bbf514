"""A user's demands on a plan, and what a model rules out: tables, files, checks."""
