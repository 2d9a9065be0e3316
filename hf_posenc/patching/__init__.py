"""From a scheme to changes of a live model, and back."""
