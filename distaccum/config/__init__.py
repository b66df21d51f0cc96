"""What a run is told: frozen dataclasses that are the schema of ``conf/``, checked as they are made.

May import ``errors``; no torch. In this room only ``schema``, ``instantiate`` and ``command_line`` know
OmegaConf and Hydra.
Begin with ``schema.py``, whose groups are in ``batch.py``, ``trainer.py`` and ``metrics.py``; an engine's settings are
in ``engine.py``, number formats in ``precision.py``. A setting's meaning is under ``Args:`` of its dataclass, where
``tools/settings.py`` reads it.
"""
