"""The output of commands: tables and text."""
