"""What the death of a process costs a run, in time and in work: ``python launch/bench elastic``."""
