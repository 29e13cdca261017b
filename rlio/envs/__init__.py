"""Environments: making vector environments, and stepping any of them in one way.

`making` turns what a user names into a vector environment; `stepping` gives the true transitions of one,
whatever its autoreset mode; `leaves` says which arrays a space's values are made of.
"""
