"""What ``quire doctor`` finds out about this machine before a command serves on it."""
