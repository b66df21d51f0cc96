"""The models of the default configurations.

May import ``errors``; nothing in the package imports them.
Begin with ``gpt.py``.
"""
