"""Which rows are read, and in which order: filters, splits, orders and positions."""
