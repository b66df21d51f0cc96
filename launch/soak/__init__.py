"""A soak: real runs under a seeded schedule of real faults, compared with undisturbed ones to the last bit.

The command is ``python -m launch.soak seed=1 minutes=20``; begin with ``main.py``, or with ``schedule.py``,
which has the faults.
"""
