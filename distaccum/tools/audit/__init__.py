"""Compares the gradient that any training loop steps with, in any framework, with the global batch's.

May import ``engines`` and what it may import; nothing imports it but ``distaccum/audit.py``, the command.
The room is not called ``audit``: that is the context manager in ``from distaccum import audit``, and a command.
Begin with ``session.py``: the context manager. ``watch.py`` records a loop, ``reference.py`` computes micro-batches'
gradients again in fp64, ``causes.py`` finds out which sum of them the loop's gradient is, and ``report.py`` says so.
"""
