"""Whole runs in one process, under faults of single system calls: see ``test_cells.py``."""
