"""Images of MuJoCo states, drawn in processes of their own."""
