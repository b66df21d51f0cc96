"""Records of logged windows, and where they go: console, ``metrics.jsonl``, Weights & Biases."""
