"""What a person demands of a plan, and what a model rules out: tables, files, checks."""
