"""Live sampling: a policy acts in environments, and its steps become batches and episodes.

`env_runner` steps and records, as `config` says; `recorder` holds the columns; `evaluate` measures a policy.
"""
