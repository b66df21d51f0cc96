"""``distaccum compare``: the first window in which two runs differ, and in what."""
