"""The life cycle of one adapter: a table, one module a state.

What it is: the definition (`machine`), and the same table compiled for the hot path (`table`). What
it is not: goals, budgets or effects. One rule: guards and callbacks are absent on purpose; a move
is a fact that a report told, and what is not in the table is refused and changes nothing.
"""
