"""distaccum: state the global batch, get exactly its gradient."""

__version__ = "0.1.0"
