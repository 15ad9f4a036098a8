"""`make gpu`: what only a machine with a GPU can show."""
