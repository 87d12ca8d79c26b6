"""Which requests run in a step, and which blocks they get."""
