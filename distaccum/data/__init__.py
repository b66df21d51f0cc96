"""From a dataset to counted windows of micro-batches on the device.

May import ``config``, ``distributed``, ``losses``, ``models`` and ``errors``.
Begin with ``plan/batch.py`` (pure arithmetic), then ``loader.py``, which turns a plan into windows.
``spec.py`` says what a dataset offers; those of the default configurations are in ``datasets/``.
"""
