/* What is known: the state of all adapters as a fold of the events, and the events themselves. */
const STATES = ["gpu-slot", "pinned", "cpu-cached", "evicted", "unregistered"];
const PAST_MAX = 50000, WAITS_MAX = 6;
const world = { seq: 0, adapters: new Map(), status: null, may_change: false };
let log = [], hasWholeLog = false;
/* The moment that is shown: { seq, time_ms, adapters }, or null for now. */
let past = null;

function adapterOf(adapters, name) {
  if (!adapters.has(name)) {
    adapters.set(name, { id: name, state: "unregistered", slot: null, held: false,
      bytes: { host: 0, pinned: 0, device: 0 }, blob: 0, leases: 0, waiting: 0 });
  }
  return adapters.get(name);
}
function apply(adapters, event) {
  const move = (state, slot = null) => {
    const adapter = adapterOf(adapters, event.adapter);
    adapter.state = state; adapter.slot = slot;
    const known = world.adapters.get(event.adapter);
    const size = adapter.blob || (known && known.bytes ? Math.max(...Object.values(known.bytes)) : 0);
    adapter.blob = size;
    adapter.bytes = { host: state === "cpu-cached" ? size : 0,
      pinned: state === "pinned" || state === "gpu-slot" ? size : 0, device: state === "gpu-slot" ? size : 0 };
  };
  switch (event.type) {
    case "AdapterAccepted": adapterOf(adapters, event.adapter).blob = event.blob_bytes; break;
    case "AdapterCached": case "AdapterUnpinned": move("cpu-cached"); break;
    case "AdapterPinned": case "AdapterDeactivated": move("pinned"); break;
    case "AdapterActivated": move("gpu-slot", event.slot); break;
    case "AdapterEvicted": move("evicted"); break;
    case "AdapterRemoved": adapters.delete(event.adapter); break;
    case "AdapterHeld": case "AdapterReleased":
      adapterOf(adapters, event.adapter).held = event.type === "AdapterHeld"; break;
  }
}
/* The state after event `seq`, and when that event was. */
function stateAfter(seq) {
  const adapters = new Map();
  let time_ms = log.length ? log[0].time_ms : Date.now();
  for (const entry of log) {
    if (entry.seq > seq) break;
    apply(adapters, entry.event);
    time_ms = entry.time_ms;
  }
  return { seq, time_ms, adapters };
}

/* Slots over time: bars and marks as another fold of the events. */
class Residency {
  /* An event says how long a wait was, once it is over: `waiting` are the others that this page sees. */
  constructor(waiting = new Map()) {
    this.bars = []; this.marks = []; this.open = new Map(); this.start_ms = null;
    this.waits = []; this.waiting = waiting; this.rowEnds = Array(WAITS_MAX).fill(0);
    /* Where each adapter was: its tier from one time to another. */
    this.stays = []; this.stay = new Map();
  }
  apply({ seq, time_ms, event }) {
    if (this.start_ms === null) this.start_ms = time_ms;
    if (event.type in TIER_OF) this.move(event.adapter, TIER_OF[event.type], time_ms);
    switch (event.type) {
      case "AdapterActivated":
        this.waited(event, time_ms);
        this.begin(event.slot, event.adapter, time_ms, event.duration_ns); break;
      case "AdapterDeactivated": this.end(event.slot, event.adapter, time_ms); break;
      case "AdapterCached": this.mark(seq, "▼", event.adapter, `loaded in ${seconds(event.duration_ns / 1e9)}`, time_ms); break;
      case "AdapterEvicted":
        this.leave(event.adapter, time_ms);
        this.mark(seq, "×", event.adapter, `evicted: ${event.reason}`, time_ms); break;
      case "AdapterRemoved": this.leave(event.adapter, time_ms); break;
      case "AdapterFailed": this.mark(seq, "!", event.adapter, `failed: ${event.code} ${event.message}`, time_ms); break;
      case "EngineDetached":
        for (const slot of [...this.open.keys()]) this.close(slot, time_ms);
        this.mark(seq, "┆", "", "the engine is gone", time_ms); break;
      case "EngineAttached": this.mark(seq, "┆", "", "an engine is attached", time_ms); break;
      case "ControllerResumed": this.mark(seq, "┆", "", "the controller started", time_ms); break;
    }
  }
  begin(slot, adapter, from_ms, duration_ns) {
    this.close(slot, from_ms);
    this.open.set(slot, { slot, adapter, from_ms, to_ms: null, write_s: duration_ns / 1e9 });
  }
  end(slot, adapter, to_ms) {
    /* Its beginning was before the first event that is known. */
    if (!this.open.has(slot)) this.open.set(slot, { slot, adapter, from_ms: this.start_ms, to_ms: null });
    this.close(slot, to_ms);
  }
  leave(adapter, to_ms) {
    for (const [slot, bar] of this.open) if (bar.adapter === adapter) this.close(slot, to_ms);
  }
  close(slot, to_ms) {
    const bar = this.open.get(slot);
    if (!bar) return;
    this.open.delete(slot);
    this.bars.push({ ...bar, to_ms });
  }
  mark(seq, sign, adapter, text, time_ms) { this.marks.push({ seq, sign, adapter, text, time_ms }); }
  move(adapter, tier, time_ms) {
    const last = this.stay.get(adapter);
    if (last) this.stays.push({ ...last, to_ms: time_ms });
    if (tier) this.stay.set(adapter, { adapter, tier, from_ms: time_ms, to_ms: null });
    else this.stay.delete(adapter);
  }
  /* What a card says now: a wait that no event ends, as that of paused outputs, is as long as it was seen. */
  wait(adapter, isWaiting, time_ms) {
    const seen = this.waiting.get(adapter);
    if (isWaiting && !seen) this.waiting.set(adapter, { adapter, row: this.rowFor(time_ms), from_ms: time_ms, to_ms: null });
    if (isWaiting || !seen) return;
    this.waiting.delete(adapter);
    this.addWait({ ...seen, to_ms: time_ms });
  }
  waited({ adapter, slot, wait_ns }, to_ms) {
    if (!wait_ns) return;
    const from_ms = to_ms - wait_ns / 1e6, seen = this.waiting.get(adapter);
    this.waiting.delete(adapter);
    this.addWait({ adapter, row: seen ? seen.row : this.rowFor(from_ms), from_ms, to_ms, after: this.occupant(slot, from_ms, to_ms) });
  }
  addWait(wait) {
    this.rowEnds[wait.row] = Math.max(this.rowEnds[wait.row], wait.to_ms);
    this.waits.push(wait);
    if (this.waits.length > PAST_MAX) this.waits.splice(0, PAST_MAX / 2);
  }
  /* The first free row, else the one that is free next. */
  rowFor(from_ms) {
    const ends = [...this.rowEnds];
    for (const one of this.waiting.values()) ends[one.row] = Infinity;
    const free = ends.findIndex(end => end <= from_ms);
    return free < 0 ? ends.indexOf(Math.min(...ends)) : free;
  }
  /* The adapter that left a slot last between two times; bars are in the order of their ends. */
  occupant(slot, from_ms, to_ms) {
    for (let index = this.bars.length - 1; index >= 0 && this.bars[index].to_ms > from_ms; index -= 1) {
      const bar = this.bars[index];
      if (bar.slot === slot && bar.to_ms <= to_ms) return bar.adapter;
    }
    return null;
  }
  /* The bars that begin before `until_ms` and end after `since_ms`. */
  between(since_ms, until_ms) {
    const found = [];
    for (let index = this.bars.length - 1; index >= 0; index -= 1) {
      const bar = this.bars[index];
      if (bar.to_ms > since_ms && bar.from_ms < until_ms) found.push(bar);
    }
    for (const bar of this.open.values()) if (bar.from_ms < until_ms) found.push(bar);
    return found;
  }
}
/* The tier that an adapter is in after an event; empty for none. */
const TIER_OF = {
  AdapterCached: "cpu-cached", AdapterUnpinned: "cpu-cached", AdapterPinned: "pinned", AdapterDeactivated: "pinned",
  AdapterActivated: "gpu-slot", AdapterEvicted: "", AdapterRemoved: "",
};
let residency = new Residency();
function foldAgain() {
  residency = new Residency(residency.waiting);
  for (const entry of log) residency.apply(entry);
}
