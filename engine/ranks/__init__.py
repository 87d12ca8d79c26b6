"""One model over several processes of one machine (tensor parallelism)."""
