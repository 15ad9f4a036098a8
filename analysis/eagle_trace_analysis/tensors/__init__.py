"""Tensors: the trained weights held against what the server holds, and of what kind a difference is."""
