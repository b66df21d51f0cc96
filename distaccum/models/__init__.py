"""The models that the examples train."""
