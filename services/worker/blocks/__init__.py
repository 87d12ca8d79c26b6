"""Blocks between this worker and others: reading, pulling, copying, and the transport."""
