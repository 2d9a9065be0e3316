"""The maths and data types that the rest is built on. Nothing here knows a model."""
