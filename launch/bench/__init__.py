"""Measurements of what distaccum costs, next to hand-written loops, other frameworks and the theory.

The command is ``python launch/bench``; begin with ``main.py``, which lists what it can measure.
"""
