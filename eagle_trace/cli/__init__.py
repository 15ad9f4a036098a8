"""The command line. Commands are thin: they parse, call, and print; hosts and analysis are imported inside them."""
