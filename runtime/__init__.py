"""The code that generated scripts import; it imports none of the other folders."""
