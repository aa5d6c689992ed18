"""The life cycle of one adapter: two tables, and the machine that is made from them.

There are no guards and no callbacks: a transition records what a report stated, and an input that
the table does not list is refused and changes nothing.
"""
