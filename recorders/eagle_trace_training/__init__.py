"""What recording any trainer needs.

Split by concern: what is fed (`documents`, `replay`, `features`; `batches`, `first_tokens` in training), one recording
of it (`session`; `live` and `live_batches` in training), how much of a difference is rounding (`floors`), and recording
somebody else's training command (`command`, `arm`).
"""
