"""Two hosts with a slow link between them, on one machine: what training sends over it, and how long it takes."""
