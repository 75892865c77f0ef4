/** The settings: kept in the browser, shown in the panel, and turned into the body of a request. */

import { announce, byId } from "./dom.js";
import { load, save } from "./storage.js";

const DEFAULTS = {
  temperature: null, // the model's own
  topP: null,
  maxTokens: 512,
  seed: null,
  method: "",
  width: "",
  tree: "",
  system: "",
};
const FIELDS = {
  temperature: "set-temperature",
  topP: "set-top-p",
  maxTokens: "set-max-tokens",
  seed: "set-seed",
  method: "set-method",
  width: "set-width",
  tree: "set-tree",
  system: "set-system",
};
const NUMBERS = ["temperature", "topP", "maxTokens", "seed"];
const WIDEST = 16;

let values = { ...DEFAULTS, ...load("localStorage", "settings", {}) };

export function startSettings() {
  const width = byId("set-width");
  for (let count = 0; count <= WIDEST; count += 1) {
    width.add(new Option(count === 0 ? "0 (plain)" : String(count), String(count)));
  }
  for (const [name, id] of Object.entries(FIELDS)) byId(id).addEventListener("input", () => take(name));
  byId("reset-settings").addEventListener("click", () => {
    values = { ...DEFAULTS };
    save("localStorage", "settings", values);
    fill();
    announce("Settings reset.");
  });
  fill();
  startPanel();
}

/** Offers the methods that the server has loaded. A kept one that is gone falls back to the server's own. */
export function offerMethods(model) {
  const select = byId("set-method");
  const offered = (model.methods ?? []).map((name) => new Option(name === "none" ? "none (plain)" : name, name));
  select.replaceChildren(new Option(`the server's (${model.method ?? "auto"})`, ""), ...offered);
  if (!(model.methods ?? []).includes(values.method)) values.method = "";
  fill();
}

export function showAdvice(text) {
  byId("advice").textContent = text ? `From the last answer: ${text}` : "";
  byId("advice").hidden = !text;
}

export const settings = () => ({ ...values });

/** The sampling half of a body. What is not set is left to the model. */
export function samplingBody({ temperature, topP, maxTokens, seed }) {
  const body = {};
  if (temperature !== null) body.temperature = temperature;
  if (topP !== null) body.top_p = topP;
  if (maxTokens !== null) body.max_tokens = maxTokens;
  if (seed !== null) body.seed = seed;
  return body;
}

/** The speculating half of a body. */
export function speculationBody({ method, width, tree }) {
  const speculation = { trace: true };
  if (method) speculation.draft = method;
  if (method === "none") return speculation;
  if (width !== "") speculation.width = Number(width);
  if (tree !== "") speculation.tree = tree === "on";
  return speculation;
}

/** Takes over what was typed; what is no valid value is marked and not used. */
function take(name) {
  const field = byId(FIELDS[name]);
  const isValid = field.checkValidity();
  field.setAttribute("aria-invalid", String(!isValid));
  if (!isValid) return;
  values[name] = NUMBERS.includes(name) ? (field.value.trim() === "" ? null : Number(field.value)) : field.value;
  save("localStorage", "settings", values);
  showUse();
}

function fill() {
  for (const [name, id] of Object.entries(FIELDS)) {
    byId(id).value = values[name] ?? "";
    byId(id).removeAttribute("aria-invalid");
  }
  showUse();
}

/** Plain decoding has no width and no tree. */
function showUse() {
  const isPlain = values.method === "none";
  byId("set-width").disabled = isPlain;
  byId("set-tree").disabled = isPlain || values.width === "0";
}

/** Beside the page where there is room, above it on a narrow screen. */
function startPanel() {
  const panel = byId("settings");
  const opener = byId("open-settings");
  const isWide = window.matchMedia("(min-width: 64rem)");
  const open = () => {
    if (isWide.matches) panel.show();
    else panel.showModal();
    opener.setAttribute("aria-expanded", "true");
  };
  opener.addEventListener("click", () => (panel.open ? panel.close() : open()));
  byId("close-settings").addEventListener("click", () => panel.close());
  panel.addEventListener("close", () => {
    opener.setAttribute("aria-expanded", "false");
    opener.focus();
  });
  panel.addEventListener("click", (event) => {
    if (event.target === panel) panel.close(); // beside the panel, where it lies above the page
  });
  isWide.addEventListener("change", () => {
    if (panel.open) panel.close();
  });
}
