"""Level 3 and the commands: a run from its configuration to its status file.

May import every lower room.
Begin with ``run.py`` (a run), then ``loop.py`` (its windows); ``cli.py`` is the command, ``trainer.py`` the class.
"""
