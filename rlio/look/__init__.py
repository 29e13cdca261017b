"""What is in a data set, and whether it is any good: rows and episodes by number, the table of episodes,
statistics of columns.
"""
