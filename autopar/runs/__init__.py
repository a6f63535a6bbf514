"""A training in a folder of its own: started, watched, analysed, planned again."""
