"""Which number format computes what, and the loss scale of fp16.

May import ``config``, ``distributed``, ``losses``, ``models`` and ``errors``.
Begin with ``policy.py``; ``autocast.py`` applies a policy to a model, ``loss_scale.py`` moves the loss scale.
``scaler.py`` is for hand-written loops: no engine uses it.
"""
