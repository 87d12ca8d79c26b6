"""Fairness: how clients share what is scarce, by weight, and the order of one client's requests."""
