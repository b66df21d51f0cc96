"""Which sample belongs to which window, rank and micro-batch: pure arithmetic, no torch."""
