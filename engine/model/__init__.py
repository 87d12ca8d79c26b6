"""The forward pass: modules over paged blocks, as one compiled step, divided among ranks."""
