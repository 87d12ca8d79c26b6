"""What a router measures."""
