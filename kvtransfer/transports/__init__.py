"""Brings the bytes of blocks from other workers, in one of several ways with one interface."""
