"""What is in stored data: rows and episodes by number, and the table of episodes."""
