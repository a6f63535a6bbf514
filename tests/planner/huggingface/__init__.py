"""Tiny Hugging Face models, and the axes that their modelling code gives each parameter."""
