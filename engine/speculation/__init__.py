"""Proposes draft tokens and learns how many are right."""
