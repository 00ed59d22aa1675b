"use strict";
// Both planners: the options of a design, and what Python computes from them.

const SLIDERS = { parameters: [6, 12.3, "count"], accelerators: [0, 5, "whole"], mtbf: [1, 6, "h"], storage: [8, 13, "B/s"],
  stall: [-1, 2, "%"], tokens: [2, 8, "count"] };
const CHOICES = { accelerator: ["H100", "H200", "A100", "L4", "B200", "MI300X"], dtype: ["bf16", "fp8", "tf32", "fp32"] };
const WORDS = { parameters: "parameters", accelerators: "accelerators", accelerator: "accelerator", dtype: "products in",
  context: "context", tokens: "tokens of a batch", network: "network of each", mtbf: "MTBF of one", storage: "storage",
  stall: "stall, of a write", budget: "budget", interval: "your interval", restart: "restart" };
const inputs = {}; let latest = 0, defaults = {};
const short = x => { for (const [s, f] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (x >= f) return +(x / f).toPrecision(3) + s; return String(Math.round(x)); };
const text = (x, unit) => unit === "count" ? short(x) : unit === "whole" ? String(Math.max(1, Math.round(x))) :
  unit === "B/s" ? short(x).replace("B", "G").replace("k", "k") + "B/s" : +x.toPrecision(3) + unit;
const number = (t, unit) => { const found = /^([\d.eE+]+)\s*([kKMGBT]?)/.exec(t); if (!found) return NaN;
  return parseFloat(found[1]) * ({ k: 1e3, K: 1e3, M: 1e6, G: 1e9, B: unit === "B/s" ? 1 : 1e9, T: 1e12 }[found[2]] || 1); };
const seconds = s => s >= 86400 ? (s / 86400).toPrecision(3) + " d" : s >= 3600 ? (s / 3600).toPrecision(3) + " h" : s >= 60 ?
  (s / 60).toPrecision(3) + " min" : s >= 1 ? s.toPrecision(3) + " s" : (s * 1e3).toPrecision(3) + " ms";
function element(tag, parent, words, more = {}) { const made = document.createElement(tag); if (words !== undefined) made.textContent = words;
  Object.assign(made, more); parent.append(made); return made; }
function follow(name) { const slider = inputs[name].slider; if (!slider) return; const at = Math.log10(number(inputs[name].value.value, SLIDERS[name][2]));
  if (Number.isFinite(at)) slider.value = at; }
function build(options) {
  const box = document.getElementById("design");
  for (const name of Object.keys(options)) {
    const label = element("label", box); element("span", label, WORDS[name]);
    const value = CHOICES[name] ? element("select", label) : element("input", label, undefined, { type: "text" });
    for (const one of CHOICES[name] || []) element("option", value, one);
    value.name = name; inputs[name] = { value };
    if (SLIDERS[name]) { const [low, high, unit] = SLIDERS[name];
      const slider = inputs[name].slider = element("input", label, undefined, { type: "range", min: low, max: high, step: 0.02 });
      slider.setAttribute("aria-label", WORDS[name]);
      slider.addEventListener("input", () => { value.value = text(10 ** slider.value, unit); ask(); }); }
    value.addEventListener("input", () => { follow(name); ask(); });
  }
}
function take(options) { for (const [name, value] of Object.entries(options)) { inputs[name].value.value = value; follow(name); } ask(); }
async function ask() {
  const mine = ++latest, query = new URLSearchParams(Object.entries(inputs).map(([name, one]) => [name, one.value.value]));
  const reply = await fetch("/api/plan/answer?" + query), found = await reply.json();
  if (mine !== latest) return;
  document.getElementById("error").textContent = found.error || "";
  if (found.error) return;
  document.getElementById("summary").textContent = found.summary;
  document.getElementById("advice").textContent = found.checkpoint.exceeded ? "The budget is exceeded: " +
    found.checkpoint.advice.map(one => one.change).join("; or ") + "." : "Within the budget.";
  document.getElementById("save").href = "/api/plan/design?" + query;
  strategies(found.cluster); curve(found);
  document.body.dataset.ready = String(mine);
}
const kind = n => n < 2 ? {} : { className: "number" };
function strategies(cluster) {
  const table = document.getElementById("strategies"); table.replaceChildren();
  const head = element("tr", table);
  ["strategy", "layout", "memory", "step", "MFU", "tokens/s"].forEach((words, n) => element("th", head, words, kind(n)));
  for (const one of [...cluster.strategies, ...(cluster.best ? [cluster.best] : [])]) {
    const row = element("tr", table, undefined, { className: one.fits ? "" : "no" }), m = one.memory;
    const total = m.weights + m.gradients + m.optimizer + m.activations;
    [one.name, one.layout, (total / 1e9).toFixed(total < 1e10 ? 2 : 0) + " GB" + (one.fits ? "" : " ✗"), seconds(one.step_s),
      (100 * one.mfu).toFixed(1) + " %", Math.round(one.tokens).toLocaleString("en")].forEach((words, n) => element("td", row, words, kind(n)));
  }
}
function curve(found) {
  const svg = document.getElementById("curve"), { interval_s: t, total, io, rework } = found.curve, plan = found.checkpoint;
  const top = Math.min(2, 8 * Math.max(plan.best.total, plan.yours ? plan.yours.total / 4 : 0)), low = Math.log(t[0]), high = Math.log(t[t.length - 1]);
  const x = s => 56 + 690 * (Math.log(s) - low) / (high - low), y = part => 284 - 268 * Math.min(part, top) / top;
  const draw = (tag, more, words) => { const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [k, v] of Object.entries(more)) made.setAttribute(k, v); if (words !== undefined) made.textContent = words; svg.append(made); };
  svg.replaceChildren();
  for (let n = 0; n <= 4; n++) { const part = top * n / 4;
    draw("line", { x1: 56, x2: 746, y1: y(part), y2: y(part), stroke: "var(--line)" });
    draw("text", { x: 50, y: y(part) + 4, "text-anchor": "end" }, (100 * part).toPrecision(2) + " %"); }
  for (let n = 0; n < 5; n++) { const s = Math.exp(low + (high - low) * n / 4);
    draw("text", { x: x(s), y: 306, "text-anchor": n === 4 ? "end" : n ? "middle" : "start" }, seconds(s)); }
  if (plan.budget < top) draw("line", { x1: 56, x2: 746, y1: y(plan.budget), y2: y(plan.budget), stroke: "#8a94a3", "stroke-dasharray": "6 4" });
  const line = (values, color, id) => draw("polyline", { id, fill: "none", stroke: color, "stroke-width": 2, points: t.map((s, n) => `${x(s).toFixed(1)},${y(values[n]).toFixed(1)}`).join(" ") });
  line(io, "#c77700", "io"); line(rework, "#2f8f4e", "rework"); line(total, "#1b62c4", "total");
  for (const [cost, color] of [[plan.best, "#1b62c4"], [plan.yours, "#b3261e"]]) if (cost && cost.interval_s >= t[0] && cost.interval_s <= t[t.length - 1]) {
    draw("circle", { cx: x(cost.interval_s), cy: y(cost.total), r: 5, fill: color });
    draw("text", { x: x(cost.interval_s), y: y(cost.total) - 10, "text-anchor": "middle" }, seconds(cost.interval_s)); }
}
(async () => {
  const { options, presets } = await (await fetch("/api/plan/presets")).json(); defaults = options; build(options);
  for (const [name, more] of Object.entries(presets)) element("button", document.getElementById("presets"), name, { onclick: () => take({ ...defaults, ...more }) });
  const wanted = Object.fromEntries(new URLSearchParams(location.search)), preset = presets[wanted.preset] || {}; delete wanted.preset;
  take({ ...defaults, ...preset, ...wanted });
})();
