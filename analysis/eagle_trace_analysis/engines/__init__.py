"""Engines: what a server does to a checkpoint, one package per server."""
