"""The state of envs: snapshots, checkpoints, edits of MuJoCo models, and what images are drawn from."""
