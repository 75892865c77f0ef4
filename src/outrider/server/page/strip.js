/** The live strip: four figures, and what each of the last rounds drafted and kept. */

import { byId, oncePerFrame } from "./dom.js";
import { load, save } from "./storage.js";
import { number, percent } from "./meter.js";

const BARS = 40;
const HEIGHT = 28;
const SVG = "http://www.w3.org/2000/svg";
const DASH = "\u2013";

let meter = null;
let race = load("sessionStorage", "race", null); // the ratio of the last race
let bars = [];

const draw = oncePerFrame(() => {
  figure("rate", meter?.tokensPerSecond, number);
  figure("acceptance", meter?.acceptance, percent);
  figure("per-round", meter?.tokensPerRound, (value) => value.toFixed(2));
  drawSpeedup();
  drawBars(meter?.history.slice(-BARS) ?? []);
});

export function startStrip() {
  const svg = byId("sparkline");
  for (let place = 0; place < BARS; place += 1) {
    bars.push([bar(svg, "drafted", place), bar(svg, "accepted", place)]);
  }
  draw();
}

/** Shows `shown` from now on; call it again whenever its figures moved. */
export function showMeter(shown) {
  meter = shown;
  draw();
}

export function showRace(ratio) {
  race = ratio;
  save("sessionStorage", "race", ratio);
  draw();
}

function figure(name, value, format) {
  byId(name).textContent = value === null || value === undefined ? DASH : format(value);
}

function drawSpeedup() {
  const measured = meter?.measuredSpeedup ?? null;
  figure("speedup", measured ?? race, (value) => `${value.toFixed(2)}\u00d7`);
  const source =
    measured !== null
      ? "Measured by the server while it answered: time of plain passes against time of rounds."
      : race !== null
        ? "Measured by the last race on this page."
        : "Not measured yet: the server measures it as it goes, or run a race.";
  byId("speedup-cell").title = `How much faster than plain decoding. ${source}`;
}

function bar(svg, kind, place) {
  const made = document.createElementNS(SVG, "rect");
  made.setAttribute("class", kind);
  made.setAttribute("x", place * 4);
  made.setAttribute("width", 3);
  svg.append(made);
  return made;
}

function drawBars(history) {
  const top = Math.max(4, ...history.map(([drafted]) => drafted));
  bars.forEach((pair, place) => {
    const counts = history[place - (BARS - history.length)] ?? [0, 0];
    pair.forEach((rect, kind) => {
      const height = (counts[kind] / top) * HEIGHT;
      rect.setAttribute("y", HEIGHT - height);
      rect.setAttribute("height", height);
    });
  });
}
