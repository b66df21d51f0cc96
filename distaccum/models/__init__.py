"""The models of the default configurations, and what makes a module of a Keras model.

May import ``errors``; nothing in the package imports them.
Begin with ``gpt.py``.
"""
