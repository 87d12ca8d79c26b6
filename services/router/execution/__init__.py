"""A request from its first attempt to its last."""
