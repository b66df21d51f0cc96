"""DeepSpeed's JSON: generated from our configuration, merged with the user's, and read back into ours; no DeepSpeed."""
