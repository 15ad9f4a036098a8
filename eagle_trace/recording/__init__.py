"""What every recorder shares, whichever program it sits in."""
