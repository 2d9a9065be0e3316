"""The explorer: one page on which a scheme is chosen with sliders, and seen at work on a model's own numbers."""
