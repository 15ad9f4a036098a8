"""SGLang: what it loads, takes, ignores and refuses."""
