"""Patched models on disk: written, loaded, or refused."""
