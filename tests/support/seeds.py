"""Seeds of tests that draw their own random examples."""

import os
from random import randrange


def fresh_seed() -> int:
    """Return a new seed, and print it for the report of a failure.

    Under CI it is always the same, as Hypothesis' examples are, so that a result there is that of
    the change alone.
    """
    seed = 2026 if os.environ.get("CI") else randrange(2**32)
    print(f"seed {seed}")
    return seed
