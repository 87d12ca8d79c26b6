"""What a worker reports: its state and load to routers, and its metrics."""
