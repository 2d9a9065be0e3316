"""Text and samples to train on, made of what every Python installation carries."""
