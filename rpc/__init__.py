"""gRPC as quire uses it: channels, hardened servers, proofs, TLS and errors."""
