"""What workers generate, on its way to the client."""
