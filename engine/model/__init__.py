"""The forward pass: attention over paged blocks, the compiled step, layers divided among ranks."""
