"""A model's steps as one compiled program on the CPU."""
