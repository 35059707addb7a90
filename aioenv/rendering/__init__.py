"""Images of MuJoCo states, drawn by render workers or by the workers of envs."""
