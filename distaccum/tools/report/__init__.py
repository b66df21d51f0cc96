"""One HTML file of what runs have left in their folders: curves, final numbers, settings, plan, environment, warnings.

May import ``errors``, ``program`` and ``config``, and no torch: a report is made of files, on any machine.
Begin with ``read.py``: a run directory as far as it can be read. ``columns.py`` makes series of its records and thins
them, ``marks.py`` says where something happened, ``charts.py`` which series belong together, ``compare.py`` what
differs, ``page.py`` puts the file together from ``page.css`` and ``page.js``, ``png.py`` draws the charts as pictures.
"""
