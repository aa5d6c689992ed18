/* The picture of the slots over time: a lane per slot, and one for loads, evictions and failures. */
const LANE = 24, LABEL = 56, TOP = 18, CHARACTER = 7, SLOTS_MAX = 64, ADAPTERS_MAX = 200;
const SHADE = { "cpu-cached": .3, pinned: .6, "gpu-slot": 1 };
const TICKS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 43200, 86400];
const SPAN_MS_MIN = 2000, SPAN_MS_MAX = 7 * 86400000;
/* `until_ms` is the right edge: null follows the present. `lit` is an adapter's name. `rows`: each
   adapter has a lane with its tiers, too. */
const view = { span_ms: 60000, until_ms: null, lit: null, rows: false };

/* The moment that counts as the present: no picture of the past shows what came after it. */
function now() {
  return past ? past.time_ms : Date.now();
}
function edges() {
  const until = Math.min(view.until_ms || Infinity, now());
  return [until - view.span_ms, until];
}
function drawLanes() {
  const svg = $("lanes"), width = Math.max(200, svg.clientWidth), [since, until] = edges();
  const device = world.status && world.status.tiers.find(tier => tier.name === "device");
  const bars = residency.between(since, until);
  const waits = [...residency.waits, ...residency.waiting.values()].filter(one => one.from_ms < until && (one.to_ms === null || one.to_ms > since));
  const slots = Math.min(SLOTS_MAX, Math.max(device ? device.count_max : 0, ...bars.map(bar => bar.slot + 1)));
  const stays = view.rows ? staysBetween(since, until) : [];
  const names = [...new Set(stays.map(one => one.adapter))].sort().slice(0, ADAPTERS_MAX);
  const rows = [...Array(slots).keys(), "waiting", "events", ...names], height = TOP + LANE * rows.length;
  const x = time => LABEL + (width - LABEL) * Math.min(1, Math.max(0, (time - since) / (until - since)));
  set(svg, { viewBox: `0 0 ${width} ${height}`, height });
  svg.classList.toggle("has-lit", view.lit !== null);
  if (!svg.layers) {
    svg.layers = Object.fromEntries(["lanes", "ticks", "stays", "bars", "waits", "marks", "names"].map(name => [name, svg.appendChild(draw("g"))]));
  }
  const y = slot => TOP + LANE * slot;
  drawGround(svg.layers.lanes, rows, y, width);
  drawTicks(svg.layers.ticks, x, since, until, height, width);
  drawBars(svg.layers, bars, x, y, until);
  drawStays(svg.layers.stays, stays, x, name => y(rows.indexOf(name)), until);
  drawWaits(svg.layers.waits, waits, x, y(slots), until);
  drawMarks(svg.layers.marks, x, y(rows.indexOf("events")), since, until, height);
  write($("span"), seconds(view.span_ms / 1000));
  set(svg, { "aria-label": describe(bars, slots, since, until) });
}
function describe(bars, slots, since, until) {
  const names = new Set(bars.map(bar => bar.adapter));
  return `Slots over time, ${clock(since, 8)} to ${clock(until, 8)}: ${names.size} adapters in ${slots} slots`;
}
function drawGround(layer, rows, y, width) {
  keep(layer, rows, row => row, row => draw("g", {},
    draw("rect", { class: "lane", x: LABEL, height: LANE - 3, rx: 3 }),
    draw("text", { class: "dim", x: 0 }, labelOf(row))), (group, row) => {
    const top = y(rows.indexOf(row));
    set(group.firstChild, { y: top, width: width - LABEL });
    set(group.lastChild, { y: top + 15 });
  });
}
function labelOf(row) {
  if (typeof row === "number") return `slot ${row}`;
  return row.length <= 8 ? row : `${row.slice(0, 7)}…`;
}
function staysBetween(since, until) {
  return [...residency.stays, ...residency.stay.values()].filter(one => one.from_ms < until && (one.to_ms === null || one.to_ms > since));
}
function drawStays(layer, stays, x, yOf, until) {
  const shown = new Map();
  for (const one of stays) {
    const y = yOf(one.adapter), left = x(one.from_ms), right = x(one.to_ms === null ? until : one.to_ms);
    if (y >= TOP) shown.set(right - left < 1 ? `${one.adapter} ${Math.floor(left)}` : `${one.adapter} ${one.from_ms} ${one.tier}`, { ...one, y, left, width: Math.max(1, right - left) });
  }
  keep(layer, shown.entries(), ([key]) => key, () => draw("rect", { class: "bar", height: LANE - 9 }), (box, [, one]) => {
    set(box, { x: one.left.toFixed(1), y: one.y + 3, width: one.width.toFixed(1), fill: hue(one.adapter), "fill-opacity": SHADE[one.tier], "data-adapter": one.adapter });
    box.classList.toggle("lit", one.adapter === view.lit);
    box.stay = one;
  });
}
function drawTicks(layer, x, since, until, height, width) {
  const ticks_max = Math.max(2, Math.floor((width - LABEL) / 90));
  const step = 1000 * (TICKS_S.find(one => (until - since) / (1000 * one) <= ticks_max) || 86400);
  const zero = 60000 * new Date(until).getTimezoneOffset();
  const ticks = [];
  for (let at = Math.ceil((since - zero) / step) * step + zero; at <= until; at += step) ticks.push(at);
  keep(layer, ticks, at => at, at => draw("g", {},
    draw("line", { class: "tick" }), draw("text", { class: "dim", y: 11, "text-anchor": "middle" },
      clock(at, step % 60000 ? 8 : 5))), (group, at) => {
    set(group.firstChild, { x1: x(at), x2: x(at), y1: 14, y2: height });
    set(group.lastChild, { x: x(at), visibility: x(at) < LABEL + 24 || x(at) > width - 24 ? "hidden" : null });
  });
}
function drawBars(layers, bars, x, y, until) {
  const shown = new Map(), names = [];
  for (const bar of bars) {
    const left = x(bar.from_ms), right = x(bar.to_ms === null ? until : bar.to_ms);
    const placed = { ...bar, left, width: Math.max(1, right - left - 1) };
    /* Bars narrower than a pixel that fall together are one. */
    shown.set(placed.width <= 1 ? `${bar.slot} ${Math.floor(left)}` : `${bar.slot} ${bar.from_ms}`, placed);
    if (placed.width > 4 * CHARACTER) names.push(placed);
  }
  keep(layers.bars, shown.entries(), ([key]) => key, () => draw("rect", { class: "bar", height: LANE - 3, rx: 3 }), (box, [, bar]) => {
    set(box, { x: bar.left.toFixed(1), y: y(bar.slot), width: bar.width.toFixed(1), fill: hue(bar.adapter), "data-adapter": bar.adapter });
    box.classList.toggle("lit", bar.adapter === view.lit);
    box.bar = bar;
  });
  keep(layers.names, names, bar => `${bar.slot} ${bar.from_ms}`, bar => draw("text", { class: "name", "data-adapter": bar.adapter }), (text, bar) => {
    const room = Math.floor((bar.width - 8) / CHARACTER);
    set(text, { x: (bar.left + 5).toFixed(1), y: y(bar.slot) + 15 });
    write(text, bar.adapter.length <= room ? bar.adapter : `${bar.adapter.slice(0, room - 1)}…`);
    text.classList.toggle("lit", bar.adapter === view.lit);
  });
}
/* Thin lines, each adapter's at a height of its own. */
function drawWaits(layer, waits, x, y, until) {
  keep(layer, waits, one => `${one.adapter} ${one.from_ms}`, one => draw("rect", { class: "bar", height: 3, fill: hue(one.adapter), "data-adapter": one.adapter }), (box, one) => {
    const left = x(one.from_ms), right = x(one.to_ms === null ? until : one.to_ms);
    set(box, { x: left.toFixed(1), y: y + 2 + 3 * one.row, width: Math.max(1, right - left).toFixed(1) });
    box.classList.toggle("lit", one.adapter === view.lit);
    box.wait = one;
  });
}
function drawMarks(layer, x, y, since, until, height) {
  const found = residency.marks.filter(mark => mark.time_ms >= since && mark.time_ms <= until).slice(-500);
  if (past && past.time_ms >= since && past.time_ms <= until) found.push({ seq: "moment", sign: "|", time_ms: past.time_ms, adapter: "" });
  keep(layer, found, mark => mark.seq, mark => mark.adapter
    ? draw("text", { class: "mark", "text-anchor": "middle", "data-adapter": mark.adapter }, mark.sign)
    : draw("line", { class: mark.seq === "moment" ? "moment" : "process", y1: 14 }), (one, mark) => {
    if (mark.adapter) set(one, { x: x(mark.time_ms).toFixed(1), y: y + 15 });
    else set(one, { x1: x(mark.time_ms).toFixed(1), x2: x(mark.time_ms).toFixed(1), y2: height });
    one.classList.toggle("lit", mark.adapter === view.lit);
    one.mark = mark;
  });
}
function factsOf(target) {
  const { bar, mark, wait, stay } = target;
  if (stay) return `${stay.adapter} ${stay.tier} for ${seconds(((stay.to_ms === null ? now() : stay.to_ms) - stay.from_ms) / 1000)}, from ${clock(stay.from_ms)}`;
  if (wait && wait.to_ms === null) return `requests wait for ${wait.adapter} since ${clock(wait.from_ms)}`;
  if (wait) return `requests waited ${seconds((wait.to_ms - wait.from_ms) / 1000)} for ${wait.adapter}, until ${clock(wait.to_ms)}${wait.after ? `, in whose slot ${wait.after} was` : ""}`;
  if (mark) return `${mark.adapter ? `${mark.adapter} ` : ""}${mark.text || ""}, ${clock(mark.time_ms)}`;
  if (!bar) return "";
  const until = bar.to_ms === null || bar.to_ms > now() ? now() : bar.to_ms;
  const written = bar.write_s ? `, written in ${seconds(bar.write_s)}` : "";
  return `${bar.adapter} in slot ${bar.slot} for ${seconds((until - bar.from_ms) / 1000)}, from ${clock(bar.from_ms)}` +
    `${until === now() ? " until now" : ` to ${clock(until)}`}${written}`;
}
function light(name) {
  view.lit = view.lit === name ? null : name;
  schedule();
}
function zoom(factor, around = 1) {
  const [since, until] = edges(), at = since + around * (until - since);
  view.span_ms = Math.min(SPAN_MS_MAX, Math.max(SPAN_MS_MIN, factor * view.span_ms));
  if (view.until_ms !== null || around < .95) view.until_ms = at + (1 - around) * view.span_ms;
  followPresent();
}
function pan(part) {
  view.until_ms = edges()[1] + part * view.span_ms;
  followPresent();
}
/* At the right end the picture follows the present again. */
function followPresent() {
  if (view.until_ms !== null && view.until_ms >= now()) view.until_ms = null;
  schedule();
}
function partOf(event) {
  const box = $("lanes").getBoundingClientRect();
  return Math.min(1, Math.max(0, (event.clientX - box.left - LABEL) / (box.width - LABEL)));
}
{
  let dragged = null;
  const svg = $("lanes");
  svg.addEventListener("pointermove", event => {
    const facts = factsOf(event.target);
    if (facts) write($("facts"), facts);
    if (dragged === null || Math.abs(event.clientX - dragged) < 4) return;
    pan(-(event.clientX - dragged) / (svg.clientWidth - LABEL));
    dragged = event.clientX;
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerdown", event => { dragged = event.clientX; });
  svg.addEventListener("pointerup", () => { dragged = null; });
  svg.addEventListener("pointercancel", () => { dragged = null; });
  svg.addEventListener("click", event => { if (event.target.dataset.adapter) light(event.target.dataset.adapter); });
  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    zoom(event.deltaY + event.deltaX > 0 ? 1.25 : .8, partOf(event));
  }, { passive: false });
  const keys = { ArrowLeft: () => pan(-.25), ArrowRight: () => pan(.25), "+": () => zoom(.5), "-": () => zoom(2) };
  svg.addEventListener("keydown", event => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  for (const [id, act] of Object.entries({ earlier: keys.ArrowLeft, later: keys.ArrowRight, "zoom-in": keys["+"], "zoom-out": keys["-"] })) {
    $(id).addEventListener("click", act);
  }
  $("tiers-shown").addEventListener("click", () => {
    view.rows = !view.rows;
    set($("tiers-shown"), { "aria-pressed": view.rows });
    schedule();
  });
}
