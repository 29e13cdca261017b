"""Policies: what chooses actions, and may learn.

`policy` is the contract and `random_policy` the simplest of them; `torch_policy` makes one of a torch
module, and `dqn` and `behaviour_cloning` are two that learn.
"""
