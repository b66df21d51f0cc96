"""A run whose ranks come and go, from view to view: what is carried from one to the next, and how it goes on.

Begin with ``views.py``; ``going_on.py`` finishes the open window, ``in_place.py`` goes back to a checkpoint in memory.
"""
