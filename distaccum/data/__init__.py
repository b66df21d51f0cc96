"""From a dataset to counted windows of micro-batches on the device.

May import ``config``, ``distributed``, ``losses`` and ``errors``.
Begin with ``plan/batch.py`` (pure arithmetic), then ``window.py``, and ``loader.py``, which turns a plan into windows.
``counter.py`` sums a window's counts over the ranks; ``factory.py`` chooses plan and loader for given data.
``spec.py`` says what a dataset offers; those of the default configurations are in ``datasets/``.
"""
