"""One vector env in this process, in place of session, fleet and schedule."""
