"""Who owns parameters, gradients and the step.

May import ``precision``, ``data`` and what these may import.
Begin with ``base.py``, the contract; then ``ddp/engine.py``, and ``FusedUpdate`` in ``optimizer_step.py``, where a step
or a skip is decided.
``factory.py`` has the registry: an engine is one line there, its file or folder, and its settings, which are listed in
``ENGINES`` of ``config/engine.py``.
"""
