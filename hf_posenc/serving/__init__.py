"""Patched checkpoints in other runtimes: export them, check that they compute the same there, or refuse.

What each runtime computes is listed in `hf_posenc.engines.table`.
"""
