"""Code that the benchmark programs share: options, rounds in turns, tables, a report, and small models."""
