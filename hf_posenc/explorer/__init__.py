"""The explorer: a page to try schemes with sliders on the sizes of a model."""
