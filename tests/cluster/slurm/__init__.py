"""Tests of ``slurm/`` against a real Slurm on this machine."""
