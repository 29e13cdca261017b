"""Rollout workers in separate processes, as one reader."""
