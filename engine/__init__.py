"""The inference engine of one worker: block pool, block tables, scheduler, model runner and sampler."""
