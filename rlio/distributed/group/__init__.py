"""Rollout workers in processes of their own, as one reader."""
