"""Images between steps and render workers: of the states that steps return, for users or as observations."""
