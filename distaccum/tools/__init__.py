"""Tools beside a training run: audit, doctor, plan, report, compare, verify, export, profiles, help, and more.

A ring beside the core: each tool imports the core, and nothing in the core imports one. The command ``distaccum`` finds
them by the names in ``program.py``; the rehearsal that finds a micro-batch, a run's profiler, the table of its model,
what deals its micro-batches by cost or counts its operations, what it ran on, its texts at evaluations, its loggers to
TensorBoard and MLflow, its report at its end, what says where a NaN began, what is wrong with a gradient or a loss,
which ranks differ or which one the others wait for, what reads a command line or bounds the host's memory, and the job
that Hydra's submitit launcher starts on a cluster's node, are found by their names, too.

Begin with ``tools/report/read.py`` for what a run directory says, or with a tool's ``command.py``.
"""
