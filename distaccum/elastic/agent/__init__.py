"""Jobs that outlive their processes: one agent a node starts the workers, and tells the others when one has ended.

``python -m distaccum.elastic``, which ``launch/elastic.sh`` runs. The agents and the workers share a store, a process
of its own on node 0; what the workers make of it (the views, the windows that go on) is theirs.
Imports errors, program, config and distributed, and of train the run directory, for a run of which nobody is left.

Begin with ``agent.py``; ``board.py`` has the keys of the store, ``settings.py`` the command line, ``store_process.py``
and ``meeting.py`` the two ends of the store.
"""
