"""Runs of many measurements, each saved as soon as it is done."""
