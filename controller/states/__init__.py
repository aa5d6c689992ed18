"""The life cycle of one adapter: a table, and the machine and diagram that are made from it.

There are no guards and no callbacks: a transition records what a report stated, and an input that
the table does not list is refused and changes nothing.
"""
