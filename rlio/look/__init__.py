"""What is in a data set, and whether it is any good: statistics of columns."""
