"use strict";
/* Elements, texts and colours. */
const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/* Elements are made with text nodes only: names never become markup. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  set(element, attributes);
  element.append(...children);
  return element;
}
function draw(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  set(element, attributes);
  element.append(...children);
  return element;
}
/* Only what differs is written, so that nothing is laid out again for nothing. */
function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}
function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
/* Show items as children of `parent`, in order: an item that was shown keeps its element, so that a
   click that has begun ends on it, and the focus stays. */
function keep(parent, items, keyOf, create, update = () => {}) {
  const before = parent.kept || new Map(), kept = new Map();
  let next = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item), element = before.get(key) || create(item);
    update(element, item);
    kept.set(key, element);
    if (element === next) next = next.nextSibling;
    else parent.insertBefore(element, next);
  }
  for (const [key, element] of before) if (!kept.has(key)) element.remove();
  parent.kept = kept;
}
function hue(name) {
  /* FNV-1a, and equal lightness, so that similar names differ and none stands out. */
  let sum = 0x811c9dc5;
  for (const letter of name) sum = Math.imul(sum ^ letter.codePointAt(0), 0x01000193) >>> 0;
  return `oklch(${sum & 64 ? 74 : 66}% .13 ${(sum >>> 18) % 360})`;
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < 4) { count /= 1024; unit += 1; }
  return `${unit ? count.toFixed(1) : count} ${units[unit]}`;
}
function seconds(value) {
  if (value < 1) return `${(1000 * value).toPrecision(3)} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

/* All times are local, and the header says of which zone. */
function zone() {
  const minutes = -new Date().getTimezoneOffset(), absolute = Math.abs(minutes);
  const two = number => String(number).padStart(2, "0");
  const offset = `UTC${minutes < 0 ? "−" : "+"}${two(Math.floor(absolute / 60))}:${two(absolute % 60)}`;
  return minutes ? offset : "UTC";
}
function clock(time_ms, parts = 12) {
  const local = new Date(time_ms - 60000 * new Date(time_ms).getTimezoneOffset());
  return local.toISOString().slice(11, 11 + parts);
}
function date(time_ms) {
  const local = new Date(time_ms - 60000 * new Date(time_ms).getTimezoneOffset());
  return `${local.toISOString().slice(0, 10)} ${clock(time_ms, 8)} ${zone()}`;
}
