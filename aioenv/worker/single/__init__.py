"""Single envs in a worker, one a row."""
