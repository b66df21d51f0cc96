"""Level 2: runs windows one by one, and tracks progress and skipped steps.

May import ``verification`` and what it may import.
Begin with ``step.py``, the whole update on one screen; then ``accumulator.py``.
"""
