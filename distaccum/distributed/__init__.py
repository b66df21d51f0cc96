"""Processes: who this one is, how ranks meet, the small collectives, signals to stop, random-number state.

May import ``errors``.
Begin with ``world.py``; ``environment.py`` reads the launcher's variables, by which the ranks find each other.
``signals.py`` turns SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C into a request to stop. ``watchdog.py`` names ranks
that have stopped, from the ``activity.py`` that every loop writes.
"""
