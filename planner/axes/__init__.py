"""The meaning of every dim of every tensor: an algebra of dims, solved by unification."""
