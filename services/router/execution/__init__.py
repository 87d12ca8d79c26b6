"""Runs the attempts of a request."""
