"""Patched checkpoints in other people's runtimes: written so that they are right there, and proved, or refused."""
