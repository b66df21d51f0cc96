"""The one command, ``distaccum``: a table of subcommands, and what finds the one that is asked for.

May import every room, but imports none: a subcommand's module is loaded once it is chosen, so that ``--help`` and
``--version`` wait for neither torch nor Hydra. Begin with ``table.py``.
"""
