"""DeepSpeed's JSON: generated from distaccum's settings and merged with the user's; no torch, no DeepSpeed."""
