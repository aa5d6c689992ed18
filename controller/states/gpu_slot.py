"""`gpu-slot`: in slot s, generation g; batches may use it.

What it is: this state's row group. What it is not: dropped in one move; a slot is reset first. One
rule: its blob stays page-locked, so that leaving the slot costs no copy back.
"""

from controller.states.spec import ENGINE_LOST, SLOT_RESET, State
from messages.ids import EVICTED, GPU_SLOT, PINNED

STATE = State(
    name=GPU_SLOT,
    fact="in a device slot; batches may use it",
    host="page-locked",
    device="slot and arena extent",
    moves={SLOT_RESET: PINNED, ENGINE_LOST: EVICTED},
)
