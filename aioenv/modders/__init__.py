"""Modders: edit how a model looks, at random or by hand, and restore it."""
