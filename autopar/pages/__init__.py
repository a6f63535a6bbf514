"""The output of commands, one page per file."""
