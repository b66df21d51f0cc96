"""Divides samples into windows, ranks and micro-batches: pure arithmetic, no torch."""
