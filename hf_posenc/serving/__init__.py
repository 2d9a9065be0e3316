"""Patched checkpoints in other people's runtimes: written so that they are right there, and proved, or refused.

What is known of each runtime, and how a measurement is put there: `hf_posenc.engines.table`.
"""
