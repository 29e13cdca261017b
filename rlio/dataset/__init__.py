"""`Dataset`: the rows that are stored in one place, by number, by episode, and as tables."""
