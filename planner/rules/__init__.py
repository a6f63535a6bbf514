"""The table of ops: what may be split, what each costs, and what it saves for the backward."""
