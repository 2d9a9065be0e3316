"""Data on other runtimes (llama.cpp, vLLM, ...): which kinds of positions each computes correctly."""
