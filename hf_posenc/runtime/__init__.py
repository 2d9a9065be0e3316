"""Code that runs in the forward of a patched model."""
