/* A log as a picture: all of it at first. */
let drawing = 0;
function schedule() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; drawLanes(); });
}
function save() {
  /* An SVG file has no style sheet: what the page computes becomes attributes. */
  const copy = $("lanes").cloneNode(true), names = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family"];
  const from = $("lanes").querySelectorAll("*"), to = copy.querySelectorAll("*");
  from.forEach((element, index) => {
    const style = getComputedStyle(element);
    for (const name of names) to[index].setAttribute(name, style.getPropertyValue(name));
  });
  /* Text that is light in the dark would not be seen on white paper. */
  copy.prepend(draw("rect", { width: "100%", height: "100%", fill: getComputedStyle($("lanes").closest("section")).backgroundColor }));
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", $("lanes").clientWidth);
  const link = make("a", { download: "timeline.svg", href: URL.createObjectURL(new Blob([copy.outerHTML], { type: "image/svg+xml" })) });
  link.click();
}
log = JSON.parse($("events").textContent);
foldAgain();
view.rows = true;
past = { seq: log[log.length - 1].seq, time_ms: log[log.length - 1].time_ms, adapters: new Map() };
view.span_ms = Math.max(SPAN_MS_MIN, past.time_ms - log[0].time_ms);
write($("period"), `${date(log[0].time_ms)} to ${date(past.time_ms)}, events ${log[0].seq} to ${past.seq}`);
$("save").addEventListener("click", save);
addEventListener("resize", schedule);
schedule();
