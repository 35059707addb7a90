"""The backend that steps one vector env in this process, without workers."""
