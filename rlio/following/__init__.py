"""Reading and replaying a data set while writers extend it, with progress marks that pace the writers."""
