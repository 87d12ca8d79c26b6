"""Gets the bytes of blocks from other workers by one of several transports with a common interface."""
