"""Inputs that nobody should give: what each command says of them, as one table."""
