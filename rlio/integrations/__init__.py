"""Parts that other libraries plug in: `rlio.integrations.rllib`."""
