"""Level 2: windows run one by one, the step, progress and its skips.

May import ``engines`` and what it may import.
Begin with ``step.py``, the whole update on one screen; then ``accumulator.py``.
"""
