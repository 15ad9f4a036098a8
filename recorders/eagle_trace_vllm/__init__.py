"""Serve side: records vLLM's EAGLE-3 drafter, on either of its model runners, through vLLM's own plugin entry point.

`plugin` is what vLLM calls in every process it starts; it does nothing unless the server was armed.
"""
