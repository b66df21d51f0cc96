"""Who owns the wrapped parameters, the gradient reduction and the optimizer step."""
