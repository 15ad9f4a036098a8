"""Replay: every step of the draft forward recomputed in numpy from what one trace recorded just before it."""
