"""Level 3 and the commands: a run from its configuration to its status file.

May import every other room but ``forecast`` and ``testing``.
Begin with ``run.py`` (a run), then ``loop.py`` (its windows); ``cli.py`` is the command, ``trainer.py`` the class.
"""
