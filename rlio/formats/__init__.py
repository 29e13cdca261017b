"""Data of other libraries: which format a path has, reading it, writing it, and converting between formats.

Each module but `format` describes one format. docs/foreign.md states what each format holds and loses.
"""
