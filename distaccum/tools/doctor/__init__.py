"""What a machine, or the machines of a job, have for training; what is wrong there, and the line that mends it.

May import every room but ``train``; nothing imports it.
Begin with ``command.py``. A probe is a function of one file that returns a ``Look`` (``facts.py``): facts, and
findings, which are what is wrong and what mends it. ``limits.py`` runs each in a process of its own, which is killed
when its time is over. ``here.py`` asks the probes of one machine, ``together.py`` what ranks do together, over what is
in ``meeting.py``, and ``table.py`` shows everything.
"""
