"""The life cycle as a Mermaid state diagram, drawn from the compiled table.

What it is: a pure function from the table to text. What it is not: the file that shows it (see
`controller.shell.diagrams`). One rule: nothing is drawn that the table does not say.
"""

from controller.states.machine import STATES
from controller.states.table import MOVES


def mermaid() -> str:
    """The diagram's source, one line a row, in the table's order."""
    names = {state.name: state.name.replace("-", "_") for state in STATES}
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.name}" as {names[state.name]}' for state in STATES]
    lines.append(f"    [*] --> {names[STATES[0].name]}")
    for state in STATES:
        for trigger in state.moves:
            target = MOVES[state.name, trigger]
            lines.append(f"    {names[state.name]} --> {names[target]}: {trigger}")
    return "\n".join(lines)
