"""Diagnosis: which causes stand, what they explain, and what none of them does."""
