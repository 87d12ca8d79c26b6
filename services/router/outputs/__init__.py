"""Turns the outputs of workers into messages for the client."""
