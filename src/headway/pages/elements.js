const $ = (id) => document.getElementById(id);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function element(parent, tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}
function digits(number) {
  if (number === 0) return "0";
  const size = Math.abs(number);
  return size >= 1000 ? Math.round(number).toLocaleString("en") : size >= 100 ? number.toFixed(0) : Number(number.toPrecision(3)).toString();
}
function seconds(s) {
  const size = Math.abs(s);
  return s === 0 ? "0 s" : size >= 1 ? digits(s) + " s" : size >= 1e-3 ? digits(s * 1e3) + " ms" : digits(s * 1e6) + " µs";
}
function percent(share) { return (100 * share).toFixed(share < 0.1 ? 1 : 0) + " %"; }

function card(label, value, note) {
  const box = element($("cards"), "div", undefined, { class: "card" });
  element(box, "span", label);
  element(box, "b", value);
  element(box, "span", note || "\u00a0");
}
function row(parent, name, share, shade, text) {
  element(parent, "span", name);
  element(element(parent, "span"), "div", undefined, { style: `width:${Math.max(0, 100 * share)}%;background:${shade}` });
  element(parent, "span", text);
}
// Columns are [title, text of a row, whether that is a name].
function fill(id, columns, rows) {
  const head = element(element($(id), "thead"), "tr"), body = element($(id), "tbody");
  for (const [title, , named] of columns) element(head, "th", title, named ? { class: "name" } : {});
  for (const one of rows) {
    const line = element(body, "tr");
    for (const [, show, named] of columns) element(line, "td", show(one), named ? { class: "name" } : {});
  }
  if (!rows.length) element(element(body, "tr"), "td", "none", { class: "name" });
}
function showTip(event) {
  const tip = $("tip");
  tip.style.visibility = tip.childNodes.length ? "visible" : "hidden";
  const right = event.clientX + 16 + tip.offsetWidth > innerWidth;
  tip.style.left = (right ? event.clientX - 12 - tip.offsetWidth : event.clientX + 14) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 6) + "px";
}
function hideTip() { $("tip").style.visibility = "hidden"; }
