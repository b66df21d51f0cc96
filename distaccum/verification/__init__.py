"""A run proves its own gradient: by another road, before its first step; and compares its ranks while it trains.

May import ``engines`` and what it may import.
Begin with ``verifier.py``: which windows are proved. ``proof.py`` is one window's, ``additivity.py`` looks at the loss,
and ``replicas.py`` at what every rank holds.
"""
