"""What commands print, one table or page a file."""
