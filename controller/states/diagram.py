"""The life cycle as a Mermaid state diagram (see `controller/server/diagrams.py`)."""

from loradock.controller.states.table import STATES, TRANSITIONS


def mermaid() -> str:
    """Return the diagram's source: one line per state and per transition, in the table's order."""
    names = {state: state.replace("-", "_") for state in STATES}
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state}" as {name}' for state, name in names.items()]
    lines.append(f"    [*] --> {names[STATES[0]]}")
    lines += [
        f"    {names[source]} --> {names[target]}: {trigger}"
        for source, trigger, target in TRANSITIONS
    ]
    return "\n".join(lines)
