"""A run proves its own gradient: by another road, before its first step; and compares its ranks while it trains.

May import ``engines`` and what it may import.
Begin with ``verifier.py``: which windows are proved; ``proof.py`` is one window's. What it ran (``recorded.py``) is
run again by one of two roads: ``plain_autograd.py`` with ``comparison.py``, or, where the model is sharded,
``tools/directional.py``. Both end in what the optimizers should be given (``expected.py``), and
``optimizer_watch.py`` looks at what they are given. ``additivity.py`` looks at the loss, ``replicas.py`` at what every
rank holds.
"""
