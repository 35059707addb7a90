"""The MuJoCo model and state that images are drawn from, of one env or of many; and what was changed in models."""
