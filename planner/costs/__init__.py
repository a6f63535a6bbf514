"""Turns operations, layers and schedules into seconds and bytes; one function per formula."""
