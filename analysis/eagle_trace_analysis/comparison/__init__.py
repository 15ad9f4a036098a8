"""Comparison: the figures of every pair of rows, site by site, and the first place where the two traces part."""
