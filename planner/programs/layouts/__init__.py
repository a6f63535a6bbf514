"""The layout program: in which layout every tensor of a layer lies on the tensor axis."""
