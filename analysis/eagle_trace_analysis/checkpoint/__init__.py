"""Checkpoints on disk: what they say, read without loading a model."""
