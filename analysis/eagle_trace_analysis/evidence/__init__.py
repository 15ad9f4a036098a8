"""Evidence: what a cause may look at, each piece worked out when it is asked for."""
