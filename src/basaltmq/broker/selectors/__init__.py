"""Selectors: the subset of SQL-92 conditions with which JMS consumers choose messages. No protocol, no I/O.

parser.parse(text) ─> Selector ─> accepts(look_up), where look_up returns the value of an identifier, or None
"""
