"""Which samples when, and how they get to the device: from a dataset to counted windows of micro-batches.

May import ``config``, ``distributed``, ``losses``, ``models`` and ``errors``.
Begin with ``plan/batch.py`` (pure arithmetic), then ``loader.py``, which turns a plan into windows.
``spec.py`` says what a dataset offers; those of the default configurations are in ``datasets/``.
"""
