"""Checkpoints: whole and verified, or not there.

May import ``accumulation`` and what it may import.
Begin with ``store.py`` (how a folder appears and is verified), then ``state.py`` (what it holds).
"""
