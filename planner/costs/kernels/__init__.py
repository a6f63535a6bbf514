"""Turns shapes and a device into the seconds of one kernel; one function per formula."""
