"""What commands tell on stderr beside their page."""
