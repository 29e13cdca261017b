"""Files of other libraries and programs, opened and decoded within limits, whatever their layout is."""
