"""A forward of our own, for drafts that no recorded trainer has: EAGLE-3 with latent attention (MLA), in plain torch.

It is written after the published formulas and after what the class `Eagle3DeepseekV2ForCausalLM` is served as, and
imports no server. A trace of it says so: it is no trainer's forward, and what a trainer computed otherwise it cannot
know. `shape` reads a draft's config, `model` is the forward, `load` fills it, and `trainer` hands all of it, with the
places of its sites, to `eagle_trace_training`.
"""
