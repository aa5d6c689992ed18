"""The eviction policies of this installation: those of the core, and installed plugins.

A plugin is an entry point of the group `loradock.policies`: its name is the policy's, and its value
is a function with the signature of `Policy` of `controller/core/eviction.py`, or a subclass of
`Ranking` of `controller/core/rankings.py`. A log's header has the name, so a replay needs the same
plugin.
"""

# Only installed entry points are loaded.
from importlib.metadata import entry_points
from typing import Any, Final

from loradock.controller.core.eviction import POLICIES, ranking_of

POLICY_GROUP: Final = "loradock.policies"


class PolicyUnknownError(Exception):
    """No such policy is installed, or it can't be loaded."""


def check_policy(name: str) -> None:
    """Make sure that `Controller` knows a policy; raises `PolicyUnknownError`."""
    if name in POLICIES:
        return
    found = entry_points(group=POLICY_GROUP, name=name)
    if not found:
        raise PolicyUnknownError(
            f"policy {name!r} is not installed; known are {', '.join(known_policies())}, and a "
            f"package can add one as an entry point of the group {POLICY_GROUP}"
        )
    try:
        policy: Any = next(iter(found)).load()
    except (ImportError, AttributeError) as error:
        raise PolicyUnknownError(f"policy {name!r} can't be loaded: {error}") from error
    if not callable(policy) or (isinstance(policy, type) and ranking_of(policy) is None):
        raise PolicyUnknownError(
            f"policy {name!r} can't be used; it has to be a function or a subclass of Ranking"
        )
    POLICIES[name] = policy


def known_policies() -> list[str]:
    """Return the names of all policies; plugins are not loaded."""
    return sorted({*POLICIES, *entry_points(group=POLICY_GROUP).names})
