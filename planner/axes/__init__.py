"""What every dimension of every tensor means: an algebra of dims, found by unification."""
