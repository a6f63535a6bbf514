"""The code that a script imports; it imports none of the other folders."""
