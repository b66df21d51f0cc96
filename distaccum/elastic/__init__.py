"""Elastic runs: a rank dies, and its window goes on. Experimental: CPUs over gloo.

A ring beside the core: it imports the core, and nothing in the core imports it. ``python -m distaccum.elastic``, which
``launch/elastic.sh`` runs, is its launcher.

Begin with ``group/views.py``, the protocol as pure functions; ``agent/`` has a node's agent, ``group/`` members and
their collectives, ``engine/`` what engines hold of an open window and of others' state, ``run/`` a run view by view.
"""
