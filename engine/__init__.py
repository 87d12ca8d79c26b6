"""One worker's brain: block pool, block tables, scheduler, model runner, sampler."""
