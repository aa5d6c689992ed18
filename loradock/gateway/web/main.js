/* The stream of events, the past, and what the user does. */
const RECENT = 2000, RETRY_MS = 500, RETRY_MS_MAX = 5000, DETAILS_MS = 1000;
let reading = null, shown = null, refreshedAt = 0, missingSince = null, isReadingMissing = false;

function headers() {
  const key = $("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}
function report(text, kind) {
  write($("connection"), text);
  $("connection").className = kind;
}
/* A lost connection continues after the last event. */
async function follow() {
  for (let wait = RETRY_MS; ;) {
    reading = new AbortController();
    try {
      const continued = world.seq ? { "Last-Event-ID": String(world.seq) } : {};
      const response = await fetch("events", { headers: { ...headers(), ...continued }, signal: reading.signal });
      if (response.status === 401) { report($("key").value ? "this key is refused" : "a key is needed", "bad"); await keyChange(); continue; }
      if (!response.ok) throw new Error(`status ${response.status}`);
      report("connected", "good");
      wait = RETRY_MS;
      await readStream(response.body.getReader());
    } catch (error) {
      report("connection lost; trying again", "bad");
    }
    await new Promise(resolve => setTimeout(resolve, wait));
    wait = Math.min(2 * wait, RETRY_MS_MAX);
  }
}
function keyChange() {
  return new Promise(resolve => $("key").addEventListener("change", resolve, { once: true }));
}
async function readStream(reader) {
  const decoder = new TextDecoder();
  for (let text = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream ended");
    text += decoder.decode(value, { stream: true });
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) onBlock(text.slice(0, end));
  }
}
const RECEIVED = {
  snapshot: onSnapshot, event: onEvent, rates: onRates,
  status: status => { world.status = status; }, adapters: cards => cards.forEach(onAdapter),
};
function onBlock(block) {
  const fields = Object.fromEntries(block.split("\n").map(line => {
    const at = line.indexOf(": ");
    return [line.slice(0, at), line.slice(at + 2)];
  }));
  if (!RECEIVED[fields.event]) return;
  RECEIVED[fields.event](JSON.parse(fields.data));
  schedule();
}
function onSnapshot(data) {
  world.seq = data.seq;
  world.may_change = data.may_change;
  world.adapters = new Map(data.adapters.filter(one => !one.retired).map(one => [one.id, one]));
  world.status = data.status || world.status;
  samples = [];
  if (lastSeq() > data.seq || lastSeq() < data.seq - RECENT) { log = []; hasWholeLog = false; foldAgain(); }
  if (lastSeq() < data.seq) readMissing(Math.max(lastSeq(), data.seq - RECENT));
}
function lastSeq() { return log.length ? log[log.length - 1].seq : 0; }
/* What events do not contain; the size of an evicted adapter is kept. */
function onAdapter(one) {
  const known = world.adapters.get(one.id);
  if (one.retired) return;
  world.adapters.set(one.id, { ...one, blob: Math.max(known && known.blob || 0, ...Object.values(one.bytes)) });
  residency.wait(one.id, one.waiting > 0, Date.now());
  if (one.id === shown && performance.now() > refreshedAt + DETAILS_MS) refreshDetails();
}
function onEvent(data) {
  if (data.seq !== world.seq + 1) {
    world.seq = 0;
    reading.abort();
    return;
  }
  world.seq = data.seq;
  apply(world.adapters, data.event);
  log.push(data);
  residency.apply(data);
  if (log.length > 2 * PAST_MAX) { log.splice(0, PAST_MAX); hasWholeLog = false; foldAgain(); }
  if (!past) setScrub();
}

/* The past: the state after any event is a fold of the events up to it. */
function setScrub() {
  set($("scrub"), { max: log.length ? log[log.length - 1].seq : world.seq, min: log.length ? log[0].seq - 1 : world.seq });
  if (!past) $("scrub").value = $("scrub").max;
}
function showPast(wanted) {
  const seq = log.length ? Math.min(Math.max(wanted, log[0].seq - 1), lastSeq()) : wanted;
  past = stateAfter(seq);
  view.until_ms = null;
  $("scrub").value = String(seq);
  write($("moment"), `after event ${seq}, ${date(past.time_ms)}; the log begins at event ${log.length ? log[0].seq : 0}`);
  set($("scrub"), { "aria-valuetext": $("moment").textContent });
  remember();
  schedule();
}
/* Successive events that were read, in the place of those that are known. */
function merge(found) {
  if (!found.length) return;
  const [first, last] = [found[0].seq, found[found.length - 1].seq];
  log = [...log.filter(entry => entry.seq < first), ...found, ...log.filter(entry => entry.seq > last)];
  foldAgain();
  setScrub();
  schedule();
}
async function historyOf(query) {
  const answer = await fetch(`events/history?${query}`, { headers: headers() });
  if (!answer.ok) throw new Error(`the log can't be read: status ${answer.status}`);
  return answer.json();
}
async function eventsAfter(since, onPage = () => {}) {
  const found = [];
  while (since !== null && found.length < PAST_MAX) {
    const page = await historyOf(`since=${since}`);
    found.push(...page.events);
    since = page.next_seq;
    onPage(found.length);
  }
  return found;
}
/* The events between the last known one and a snapshot: the stream goes on after the snapshot.
   One loop reads all of them, and tries again after a failure. */
function readMissing(since) {
  missingSince = Math.min(since, missingSince ?? since);
  if (!isReadingMissing) fillGaps();
}
async function fillGaps() {
  isReadingMissing = true;
  while (missingSince !== null) {
    const since = missingSince;
    missingSince = null;
    try {
      merge(await eventsAfter(since));
    } catch {
      missingSince = Math.min(since, missingSince ?? since);
      await new Promise(resolve => setTimeout(resolve, RETRY_MS_MAX));
    }
  }
  isReadingMissing = false;
}
async function readWholeLog() {
  const found = await eventsAfter(0, count => write($("moment"), `${count} events read`));
  hasWholeLog = true;
  merge(found);
}
/* A fold that begins in the middle would lack the adapters that were loaded before. */
async function pauseAt(seq = null) {
  set($("pause"), { "aria-pressed": true });
  write($("pause"), "Continue live");
  set($("past-controls"), { hidden: null });
  try {
    if (!hasWholeLog) await readWholeLog();
    showPast(seq === null ? Number($("scrub").max) : seq);
  } catch (error) {
    write($("moment"), error.message);
  }
}
function continueLive() {
  past = null; view.until_ms = null;
  set($("pause"), { "aria-pressed": false });
  write($("pause"), "Pause");
  set($("past-controls"), { hidden: "" });
  setScrub();
  remember();
  redraw();
}
$("pause").addEventListener("click", () => past ? continueLive() : pauseAt());
$("scrub").addEventListener("input", () => showPast(Number($("scrub").value)));

/* An address for a moment and an adapter. */
function remember() {
  const parts = new URLSearchParams();
  if (past) parts.set("event", past.seq);
  if (shown) parts.set("adapter", shown);
  const hash = parts.toString();
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}
async function recall() {
  const parts = new URLSearchParams(location.hash.slice(1));
  /* The adapter is shown as it was at that moment. */
  if (/^\d+$/.test(parts.get("event") || "")) await pauseAt(Number(parts.get("event")));
  if (parts.get("adapter")) openDetails(parts.get("adapter"));
}

/* Details and changes. */
function openDetails(name) {
  shown = name;
  write($("details-name"), name);
  write($("details-message"), "");
  $("history").replaceChildren(); $("history").kept = null;
  $("fields").replaceChildren(); $("fields").kept = null;
  if (!$("details").open) $("details").showModal();
  remember();
  return refreshDetails();
}
function textOf(name, value) {
  if (value === null || value === "") return "–";
  if (Array.isArray(value)) return value.join("; ") || "–";
  if (name.endsWith("_ns")) return seconds(value / 1e9);
  return String(value);
}
/* The fields of a card, where objects are fields of their own. */
function rowsOf({ object, bytes: sizes, counters, last_used: used, ...fields }) {
  return [
    ...Object.entries(fields).map(([name, value]) => [name, textOf(name, value)]),
    ...Object.entries(sizes).map(([name, value]) => [`${name} memory`, bytes(value)]),
    ["last used", used ? date(1000 * used) : "never"],
    ...Object.entries(counters).filter(([name, value]) => value && !(name in fields))
      .map(([name, value]) => [name.replace(/_ns$/, "").replaceAll("_", " "), textOf(name, value)]),
  ];
}
function showRows(rows) {
  keep($("fields"), rows, ([name]) => name, ([name]) => make("tr", {}, make("th", { scope: "row" }, name), make("td")),
    (row, [, value]) => write(row.lastChild, value));
}
/* Of the moves, those that would change something. */
function showCard(card) {
  const isResident = card.state !== "evicted" && card.state !== "unregistered";
  const offered = { hold: !card.held, release: card.held, prefetch: card.goal !== "gpu-slot", evict: isResident && !card.held };
  for (const button of document.querySelectorAll("[data-move]")) set(button, { hidden: offered[button.dataset.move] ? null : "" });
  showRows(rowsOf(card));
}
async function refreshDetails() {
  const name = shown, path = encodeURIComponent(name);
  refreshedAt = performance.now();
  set($("moves"), { hidden: world.may_change && !past ? null : "" });
  if (past) {
    const one = past.adapters.get(name);
    write($("details-message"), `after event ${past.seq}`);
    showRows(one ? [["state", one.state], ["slot", textOf("slot", one.slot)], ["held", String(one.held)]] : [["state", "unregistered"]]);
  } else {
    const card = await fetch(`v1/lora_adapters/${path}`, { headers: headers() });
    if (shown !== name) return;
    if (card.ok) showCard(await card.json());
    else fail($("details-message"), card.status === 404 ? "no adapter has this name" : `status ${card.status}`);
  }
  try {
    const { events } = await historyOf(`adapter=${path}`);
    const until = past ? past.seq : Infinity;
    if (shown === name) keep($("history"), events.filter(one => one.seq <= until).reverse(), one => one.seq, makeLine);
  } catch (error) { fail($("details-message"), error.message); }
}
function fail(target, text) {
  write(target, text);
  target.className = "bad";
}
async function post(path, body, target) {
  write(target, "…");
  target.className = "dim";
  try {
    const answer = await fetch(path, { method: "POST", body: JSON.stringify(body),
      headers: { "Content-Type": "application/json", ...headers() } });
    const text = await answer.text();
    if (answer.ok) { write(target, "done"); target.className = "good"; return; }
    fail(target, errorIn(text) || `status ${answer.status}`);
  } catch { fail(target, "no connection"); }
}
/* The message of an error in a body; empty if there is none. */
function errorIn(text) {
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch { return ""; }
}
for (const button of document.querySelectorAll("[data-move]")) {
  button.addEventListener("click", async () => {
    await post(`v1/lora_adapters/${encodeURIComponent(shown)}/${button.dataset.move}`, {}, $("details-message"));
    await refreshDetails();
  });
}
$("light").addEventListener("click", () => { light(shown); $("details").close(); });
$("close").addEventListener("click", () => $("details").close());
$("details").addEventListener("close", () => {
  const tile = document.querySelector(`[data-id="${CSS.escape(shown)}"]`);
  if (tile) tile.focus({ preventScroll: true });
  shown = null;
  remember();
});
$("load").addEventListener("submit", event => {
  event.preventDefault();
  const name = $("load-name").value;
  post("v1/load_lora_adapter", { lora_name: name, lora_path: $("load-path").value || name }, $("message"));
});
$("key-form").addEventListener("submit", event => { event.preventDefault(); $("key").blur(); });
$("skip").addEventListener("click", () => $("adapters").focus());
$("filter").addEventListener("input", schedule);
$("search").addEventListener("input", schedule);
addEventListener("resize", schedule);
addEventListener("hashchange", recall);
$("key").value = sessionStorage.getItem("key") || "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  reading.abort();
});
write($("zone"), `times in ${zone()}`);
/* The picture moves with the time, also if nothing happens. */
setInterval(() => { if (!past && !document.hidden) schedule(); }, 1000);
follow();
recall();
