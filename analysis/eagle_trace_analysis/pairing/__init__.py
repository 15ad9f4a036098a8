"""Pairing: which row of one trace is which row of the other, and what the two are called."""
