"""What distaccum does on a GPU: the program ``python launch/bench gpu``."""
