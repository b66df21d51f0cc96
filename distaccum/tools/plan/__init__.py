"""What a job will hold, send and take on a cluster, before anything is started.

The theory is pure arithmetic, without torch; only the command, and what builds a model or times it, loads that.
Begin with ``window.py``: the time of one window, and what the model leaves out. The theory of each part is in its file:
``collectives.py`` (messages and collectives), ``overlap.py`` (what is hidden behind computing), ``volume.py`` (memory
and traffic by ZeRO), ``memory.py`` (the peak, with activations that somebody has measured). ``report.py`` puts a whole
forecast together.
"""
