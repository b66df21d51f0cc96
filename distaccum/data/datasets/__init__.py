"""The datasets of the default configurations, each a function that returns a ``DataSpec``."""
