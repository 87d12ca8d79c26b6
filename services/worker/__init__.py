"""Prefill and decode workers: one engine in two roles."""
