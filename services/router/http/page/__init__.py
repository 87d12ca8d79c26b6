"""The page at the root of the HTTP port, as files that the router sends."""
