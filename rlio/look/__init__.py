"""What is in a data set, and whether it is any good: the table of episodes, statistics of columns."""
