"""Losses as sums with counts, and the one division.

May import ``errors``.
Begin with ``normalize.py``, where the loss is divided; ``base.py`` says what a user's loss must offer.
"""
