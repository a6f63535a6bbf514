"""Finds in a model what a plan has to heed: where rows meet, what means count, what runs again."""
