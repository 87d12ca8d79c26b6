"""A request in the worker: from the message to the engine, and its outputs back to the router."""
