"""The layout program: the layout of every tensor of a layer on the tensor axis."""
