"""Serves ``vllm.grpc.engine.VllmEngine`` on a worker's port, for gateways made for vLLM's engines."""
