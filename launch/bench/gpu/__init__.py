"""What distaccum does on a GPU: the program ``python launch/bench gpu``.

Begin with ``main.py``: it runs each measurement of ``correct.py``, ``speed.py`` and ``size.py`` in a process of its own
(``worker.py``) and keeps what they give in ``report.json``. A measurement is a function from ``figures.Options`` to a
list of ``figures.Figure``.
"""
