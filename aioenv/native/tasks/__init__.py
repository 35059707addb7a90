"""Gymnasium's MuJoCo tasks (v5), each as one batch; bit for bit the same."""
