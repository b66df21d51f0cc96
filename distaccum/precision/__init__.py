"""Which number format computes what, and the loss scale of fp16.

May import ``config``, ``distributed``, ``losses`` and ``errors``.
Begin with ``policy.py``, which opens autocast; ``autocast.py`` hooks the modules of ``keep_fp32`` and ``only``.
``loss_scale.py`` moves the loss scale; ``scaler.py`` is for hand-written loops: no engine uses it.
"""
