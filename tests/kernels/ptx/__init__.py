"""Executes the PTX that Triton emits for sm_80 on a CPU; see ``launch``. For tests and measurements only."""
