"""Tables whose columns the user names, and the kinds of files that hold them."""
