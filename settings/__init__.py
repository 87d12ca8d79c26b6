"""Settings: how users give each field of a configuration, by which flag and within which limits."""
