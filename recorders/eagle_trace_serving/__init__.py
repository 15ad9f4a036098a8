"""Serve side: what recording needs of any server, whichever program it is."""
