"""The command line: each command parses its arguments, calls one public function, and prints."""
