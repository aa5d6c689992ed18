/* Small charts of the last fifteen minutes. */
const SAMPLES_MAX = 180, CHART_HEIGHT = 64;
const number = value => Number(value.toPrecision(3)).toLocaleString("en");
const share = value => `${(100 * value).toFixed(0)} %`;
/* Title, the fields of a sample, and how a value is written. */
const CHARTS = [
  ["Requests per second", ["requests_per_s"], number],
  ["Tokens per second", ["tokens_per_s"], number],
  ["First token over HTTP, p50 · p99", ["first_token_p50_s", "first_token_p99_s"], seconds],
  ["Running · waiting", ["running", "waiting"], number],
  ["Slot hits", ["hit_share"], share],
  ["Loading an adapter", ["load_s"], seconds],
  ["Engine step", ["step_s"], seconds],
  ["KV cache in use", ["cache_share"], share],
];
let samples = [], charts = [], drawn = null;

function onRates(found) {
  samples = [...samples, ...found].slice(-SAMPLES_MAX);
}
function colour(name) {
  /* Canvas does not resolve light-dark(): an element does. */
  const probe = document.body.appendChild(make("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}
function makeChart([title, fields, format]) {
  const value = make("b", {}, "–"), box = make("div", { class: "chart", "aria-hidden": "true" });
  $("rates").append(make("figure", {}, make("figcaption", {}, make("span", {}, title), value), box));
  const strokes = ["--accent", "--dim"].map(colour);
  const plot = new uPlot({
    width: Math.max(100, box.clientWidth), height: CHART_HEIGHT, legend: { show: false }, cursor: { show: false },
    padding: [6, 4, 2, 0], axes: [{ show: false }, { show: false }],
    scales: { y: { range: (_, low, high) => [0, high > 0 ? 1.05 * high : 1] } },
    series: [{}, ...fields.map((_, index) => ({ stroke: strokes[index], width: 1.5, spanGaps: false, points: { size: 3 } }))],
  }, [[], ...fields.map(() => [])], box);
  return { plot, box, value, fields, format };
}
function drawRates() {
  if (!charts.length) charts = CHARTS.map(makeChart);
  const shown = past ? samples.filter(one => one.time_ms <= past.time_ms) : samples;
  const state = `${shown.length ? shown[shown.length - 1].time_ms : 0} ${shown.length} ${charts[0].box.clientWidth}`;
  if (state === drawn) return;
  drawn = state;
  for (const { plot, box, value, fields, format } of charts) {
    plot.setSize({ width: Math.max(100, box.clientWidth), height: CHART_HEIGHT });
    plot.setData([shown.map(one => one.time_ms / 1000), ...fields.map(field => shown.map(one => one[field]))]);
    const last = shown[shown.length - 1];
    write(value, last ? fields.map(field => last[field] === null ? "–" : format(last[field])).join(" · ") : "–");
  }
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const { plot } of charts) plot.destroy();
  $("rates").replaceChildren();
  charts = []; drawn = null;
  /* At once: what is below would move up and down. */
  redraw();
});
