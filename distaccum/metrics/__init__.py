"""From device sums to records (``meter``), and from records to wherever people look (``sinks``)."""
