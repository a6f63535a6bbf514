"""A training in a folder of its own: started, told, measured, planned again."""
