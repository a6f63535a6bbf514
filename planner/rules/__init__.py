"""One table: for each op what may be split, what it costs and what it keeps for the backward."""
