/* Everything else that is drawn: at most four times a second, and nothing moves by itself. */
const DRAW_MS = 250, LOG_MAX = 300, TILES_MAX = 300;
const hiddenStates = new Set();
let timer = null, drawnAt = 0;

function schedule() {
  if (timer === null) timer = setTimeout(redraw, Math.max(0, drawnAt + DRAW_MS - performance.now()));
}
function redraw() {
  clearTimeout(timer);
  timer = null;
  drawnAt = performance.now();
  const adapters = past ? past.adapters : world.adapters;
  drawHead(); drawLanes(); drawTiers(adapters); drawRates(); drawTiles(adapters); drawLog();
}
function drawHead() {
  const status = world.status, alarms = [];
  document.body.classList.toggle("is-past", past !== null);
  set($("past-banner"), { hidden: past ? null : "" });
  if (past) write($("past-banner"), `The past: the state after event ${past.seq}, ${date(past.time_ms)}`);
  if (!status) return;
  write($("model"), past ? status.model : `${status.model || "no engine"} · ${status.requests} pending · ${status.answered} answered`);
  if (!past) alarms.push(...alarmsOf(status));
  set($("alarm"), { hidden: alarms.length ? null : "" });
  write($("alarm"), alarms.join("; "));
  set($("load"), { hidden: world.may_change && !past ? null : "" });
}
/* Why no new work is taken; with a lost connection nothing is known of now. */
function alarmsOf(status) {
  const alarms = [];
  if (!status.engine_id) alarms.push("no engine is attached: requests wait");
  if (status.log_error) alarms.push(`the log is not writable: requests are refused (${status.log_error})`);
  return alarms.length || !status.unready ? alarms : [status.unready];
}
function drawTiers(adapters) {
  if (!world.status) return;
  const values = [...adapters.values()];
  keep($("tiers"), world.status.tiers, tier => tier.name, tier => {
    const id = `tier-${tier.name}`;
    return make("div", {}, make("h3", { id }, tier.name), make("meter", { min: 0, "aria-labelledby": id }), make("div"));
  }, (box, tier) => {
    /* Slots say whether the device is full, bytes elsewhere. */
    const isDevice = tier.name === "device";
    const size = past ? values.reduce((sum, one) => sum + one.bytes[tier.name], 0) : tier.bytes;
    const slots = past ? values.filter(one => one.slot !== null).length : tier.count;
    const amount = `${bytes(size)} of ${bytes(tier.bytes_max)}`;
    const count = past && !isDevice ? "" : `${isDevice ? slots : tier.count} of ${tier.count_max} ${isDevice ? "slots" : "adapters"}`;
    const [, meter, text] = box.children;
    set(meter, isDevice ? { max: tier.count_max || 1, value: slots } : { max: tier.bytes_max || 1, value: size });
    write(text, (isDevice ? [count, amount] : tier.count_max ? [amount, count] : [amount]).filter(Boolean).join(" · "));
  });
}
function drawTiles(adapters) {
  const filter = $("filter").value.toLowerCase();
  const named = [...adapters.values()].filter(one => one.id.toLowerCase().includes(filter));
  const counts = new Map(STATES.map(state => [state, 0]));
  for (const one of named) counts.set(one.state, counts.get(one.state) + 1);
  keep($("states"), STATES, state => state, state => {
    const button = make("button", {});
    button.addEventListener("click", () => {
      if (!hiddenStates.delete(state)) hiddenStates.add(state);
      schedule();
    });
    return button;
  }, (button, state) => {
    set(button, { "aria-pressed": !hiddenStates.has(state) });
    write(button, `${state} ${counts.get(state)}`);
  });
  const shown = named.filter(one => !hiddenStates.has(one.state)).sort((a, b) => a.id < b.id ? -1 : 1);
  keep($("tiles"), shown.slice(0, TILES_MAX), one => one.id, makeTile, updateTile);
  const more = shown.length > TILES_MAX ? `and ${shown.length - TILES_MAX} more: search for a part of the name` : "";
  const none = adapters.size ? "No adapter has such a name and state."
    : "No adapters yet: `loradock load NAME` loads one.";
  write($("more"), shown.length || !world.status ? more : none);
}
function makeTile({ id }) {
  const tile = make("button", { class: "tile", "data-id": id }, make("strong", {}, id), make("span"), make("span"));
  tile.style.setProperty("--hue", hue(id));
  tile.addEventListener("click", () => openDetails(id));
  return make("li", {}, tile);
}
function updateTile(element, one) {
  const tile = element.firstChild, [, state, use] = tile.children;
  const size = Math.max(...Object.values(one.bytes), 0);
  const marks = [one.held && "held", one.leases && `${one.leases} running`, one.waiting && `${one.waiting} wait`].filter(Boolean);
  set(tile, { "data-state": one.state, title: one.id });
  write(state, one.slot === null ? one.state : `slot ${one.slot}`);
  write(use, (marks.length ? marks : size ? [bytes(size)] : []).join(" · "));
}
/* A line of the log: number, time, type and fields, with the colour of its adapter. */
function lineOf({ seq, time_ms, event }) {
  const { type, ...fields } = event;
  const texts = Object.entries(fields).filter(([, value]) => value !== "").map(([name, value]) =>
    name.endsWith("_ns") ? (value ? `${name.slice(0, -3)}=${seconds(value / 1e9)}` : "") : `${name}=${value}`);
  return `${seq}  ${clock(time_ms)}  ${type}  ${texts.filter(Boolean).join(" ")}`;
}
function makeLine(entry) {
  const line = lineOf(entry), at = line.indexOf(entry.event.type), end = at + entry.event.type.length;
  const { slot, wait_ns } = entry.event;
  const after = wait_ns ? residency.occupant(slot, entry.time_ms - wait_ns / 1e6, entry.time_ms) : null;
  const shown = make("li", {}, line.slice(0, at), make("b", {}, entry.event.type), line.slice(end), after ? ` after=${after}` : "");
  if (entry.event.adapter) shown.style.setProperty("--hue", hue(entry.event.adapter));
  return shown;
}
function drawLog() {
  const search = $("search").value.toLowerCase(), until = past ? past.seq : Infinity, found = [];
  for (let index = log.length - 1; index >= 0 && found.length < LOG_MAX; index -= 1) {
    const entry = log[index];
    if (entry.seq <= until && (!search || lineOf(entry).toLowerCase().includes(search))) found.push(entry);
  }
  set($("log"), { "data-empty": search ? "No event has this text" : "No events yet" });
  keep($("log"), found, entry => entry.seq, makeLine);
}
