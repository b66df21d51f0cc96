"""What a run does beside training: its records, evaluations, checkpoints, callbacks; each a part of the loop's list.

Begin with ``base.py``; the list is ``distaccum.train.run.open_parts``.
"""
