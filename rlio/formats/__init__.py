"""Data of other libraries: which format a path has, reading it, writing it, and converting between formats.

Each module but `format` describes one format. See docs/foreign.md for what each can say and what it loses.
"""
