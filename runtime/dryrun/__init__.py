"""A step without computing: its memory and its messages.

Scripts import from here; files import from each other.
"""

from autopar.runtime.dryrun.watching import recording

__all__ = ["recording"]
