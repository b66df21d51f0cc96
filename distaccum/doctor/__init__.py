"""What a machine, or the machines of a job, have for training; what is wrong there, and the line that mends it.

May import every room but ``train``; nothing imports it.
Begin with ``command.py``. A probe is a function of one file that returns a ``Look`` (``facts.py``): facts, and findings,
which are what is wrong and what mends it. ``limits.py`` runs each in a process of its own, which is ended when its time
is over. ``meeting.py`` brings the ranks' looks together, and ``table.py`` shows them.
"""
