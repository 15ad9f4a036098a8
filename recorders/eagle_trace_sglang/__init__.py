"""Serve side: records SGLang's EAGLE-3 draft worker through SGLang's own plugin entry point.

`plugin` is what SGLang loads in every process it starts; it does nothing unless `record` armed it.
"""
