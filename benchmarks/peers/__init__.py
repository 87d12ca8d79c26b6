"""Compares quire with vLLM, llama.cpp and transformers on the same CPU, with the same models and requests."""
