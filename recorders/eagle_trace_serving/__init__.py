"""Serve side: everything that recording needs of any server, whichever program it is.

A server's own package says what is different about it (`host`): how it is started and asked, where in its draft the
sites are, which row belongs to which request.
"""
