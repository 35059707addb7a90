"""Modders: how a model looks, changed at random or by hand, and back."""
