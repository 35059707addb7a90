"""Rollouts collected beside the envs: collector processes, each with a vector env and a policy of its own."""
