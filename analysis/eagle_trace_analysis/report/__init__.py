"""Reports: a finished `Diff` in, text or plain data out."""
