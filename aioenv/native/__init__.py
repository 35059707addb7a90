"""Tasks that are stepped as one batch; nothing is imported here."""
