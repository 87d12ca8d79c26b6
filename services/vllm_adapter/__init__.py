"""Serves ``vllm.grpc.engine.VllmEngine`` on a worker's port, for gateways that drive vLLM's engines."""
