"""The records of adapters and their versions: made, replaced, removed and renumbered.

A name stands for one version. Another version under it begins as a successor, receives the name,
the hold and the waiters once it is loaded, and the replaced one is retired: it serves the requests
that run with it, and is removed after them.
"""

from loradock.controller.core import waiting
from loradock.controller.core.context import Context
from loradock.controller.core.counters import Counters
from loradock.controller.core.world import Adapter
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages import events
from loradock.messages.ids import GPU_SLOT, UNREGISTERED, AdapterId


def register(context: Context, name: str, path: str) -> Adapter:
    """Return a new record, under a name that can stand for another version."""
    world = context.world
    adapter = Adapter(id=world.next_adapter_id, name=name, path=path or name)
    adapter.state_since_ns = world.time_ns
    world.next_adapter_id += 1
    world.adapters[adapter.id] = adapter
    world.names.setdefault(name, adapter.id)
    return adapter


def register_successor(context: Context, current: Adapter, path: str) -> Adapter:
    """Return a new record that can replace the current version of its name."""
    # The content can be the same: that is known only when the engine has read it.
    successor = register(context, current.name, path or current.path)
    successor.predecessor = current.id
    current.successor = successor.id
    context.mark_changed(current)
    return successor


def retire(context: Context, adapter: Adapter) -> None:
    """Free the name of an adapter that is removed while requests use it.

    They end with this version, as with one that was replaced.
    """
    world = context.world
    adapter.retired = True
    del world.names[adapter.name]
    # They count for the name, which is free.
    world.past_counters.add(adapter.counters)
    adapter.counters = Counters()
    context.mark_changed(adapter)
    if adapter.announced:
        context.publish(events.AdapterRemoved(adapter.name))


def promote_version(context: Context, new: Adapter) -> None:
    """Give a loaded version the name, goal, hold and waiters of the one that it replaces.

    Without a waiting request, the new version is removed instead. The replaced version serves its
    running requests and is removed after them.
    """
    world = context.world
    old = world.adapters.get(new.predecessor)
    if old is None:
        return
    new.predecessor, old.successor = 0, 0
    context.mark_changed(old)
    if not new.waiters:
        # Its requests were refused meanwhile, so it is removed without events.
        new.retired, new.announced = True, False
        context.set_goal(new, UNREGISTERED)
        return
    world.names[new.name] = new.id
    old.retired = True
    # They count for the name. What the old version still does is added when it is removed.
    new.counters.add(old.counters)
    old.counters = Counters()
    context.publish(events.AdapterReplaced(new.name, new.fingerprint))
    move_waiters(context, old, new)
    context.set_goal(new, max(new.goal, old.goal, key=RESIDENCY_LEVEL.__getitem__))
    context.keep(new, old.kept)
    if old.held:
        # The name stays held, so no event is published.
        old.held, new.held = False, True
        del world.held[old.id]
        world.held[new.id] = None
        context.set_goal(new, GPU_SLOT)
    context.set_goal(old, UNREGISTERED)
    context.dirty_adapters[old.id] = None


def move_waiters(context: Context, source: Adapter, target: Adapter) -> None:
    """Bind the requests that wait for `source` to `target`.

    Running and suspended ones keep their version.
    """
    world = context.world
    moving = [one for one in source.waiters if not world.pending_requests[one].op]
    for request_id in (*moving, *world.batches):
        pending = world.pending_requests[request_id]
        pending.adapters = tuple([target.id if a == source.id else a for a in pending.adapters])
    for request_id in moving:
        waiting.stop_waiting(context, source, request_id)
        arrived_seq = world.pending_requests[request_id].arrived_seq
        waiting.wait_for(context, target, request_id, arrived_seq)
    context.dirty_adapters[source.id] = None
    context.dirty_adapters[target.id] = None


def unlink(context: Context, adapter: Adapter) -> bool:
    """Remove the record from every index; returns whether a successor receives its name."""
    world = context.world
    del world.adapters[adapter.id]
    if adapter.id in world.warnings:
        del world.warnings[adapter.id]
    for index in (world.demoting, world.promoting, world.held):
        index.pop(adapter.id, None)
    predecessor = world.adapters.get(adapter.predecessor)
    if predecessor is not None:
        predecessor.successor = 0
        context.mark_changed(predecessor)
    successor = world.adapters.get(adapter.successor)
    if world.names.get(adapter.name) == adapter.id:
        del world.names[adapter.name]
        if successor is not None:
            world.names[adapter.name] = successor.id
    if successor is not None:
        successor.predecessor = 0
        context.mark_changed(successor)
    return successor is not None


def pass_on_counters(context: Context, adapter: Adapter) -> None:
    """Add a removed version's counters to its name's, or to the removed adapters'."""
    successor = context.world.current(adapter.name)
    if successor is None:
        context.world.past_counters.add(adapter.counters)
    else:
        successor.counters.add(adapter.counters)
        context.mark_changed(successor)


def renumber(context: Context, adapter: Adapter) -> None:
    """Give a record without weights another id, because the engine uses this one.

    No adapter is queued: an inventory empties the queues before it is compared.
    """
    world = context.world
    old, new = adapter.id, world.next_adapter_id
    world.next_adapter_id += 1
    del world.adapters[old]
    adapter.id = new
    world.adapters[new] = adapter
    if old in world.warnings:
        world.warnings[new] = world.warnings[old]
        del world.warnings[old]
    if world.names.get(adapter.name) == old:
        world.names[adapter.name] = new
    for index in (world.demoting, world.promoting, world.held):
        if old in index:
            del index[old]
            index[new] = None
    for request_id in (*adapter.waiters, *world.batches):
        pending = world.pending_requests[request_id]
        pending.adapters = tuple([new if a == old else a for a in pending.adapters])
    for other in (adapter.predecessor, adapter.successor):
        if other in world.adapters:
            _relink(context, world.adapters[other], old, new)
    context.dirty_adapters[new] = None


def _relink(context: Context, other: Adapter, old: AdapterId, new: AdapterId) -> None:
    if other.predecessor == old:
        other.predecessor = new
    if other.successor == old:
        other.successor = new
    context.mark_changed(other)
