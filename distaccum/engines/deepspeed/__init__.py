"""DeepSpeed's ZeRO stages 0 to 3, with distaccum's own window, scale and step decision."""
