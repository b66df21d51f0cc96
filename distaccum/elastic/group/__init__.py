"""Runs whose members come and go: who belongs to them, and what each of them computes."""
