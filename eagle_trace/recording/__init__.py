"""What every recorder shares: how a forward of any host gets into a trace. Names no host and imports no torch."""
