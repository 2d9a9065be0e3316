"""GGUF files for llama.cpp, written through the `gguf` package from the live model."""
