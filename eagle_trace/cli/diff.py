def diff() -> None:
    """Diff."""
