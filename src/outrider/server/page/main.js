/** Puts the page together: views, colours, keys that hold everywhere. */

import { isRunning, stopRunning } from "./ask.js";
import { startChat } from "./chat.js";
import { announce, byId } from "./dom.js";
import { currentModel, startKey } from "./model.js";
import { startRace } from "./race.js";
import { hideRound, watchRounds } from "./rounds.js";
import { startSettings } from "./settings.js";
import { load, save } from "./storage.js";
import { startStrip } from "./strip.js";

const THEMES = { auto: "as the system has it", light: "light", dark: "dark" };

function showView() {
  const view = location.hash === "#race" ? "race" : "chat";
  for (const name of ["chat", "race"]) {
    byId(`${name}-view`).hidden = name !== view;
    if (name === view) byId(`to-${name}`).setAttribute("aria-current", "page");
    else byId(`to-${name}`).removeAttribute("aria-current");
  }
  const hasMouse = window.matchMedia("(hover: hover)").matches;
  if (hasMouse) byId(view === "race" ? "race-prompt" : "prompt").focus(); // on a phone it would bring up the keyboard
}

function startTheme() {
  const root = document.documentElement;
  const show = () => {
    const words = `Colours: ${THEMES[root.dataset.theme ?? "auto"]}`;
    byId("theme").setAttribute("aria-label", words);
    byId("theme").title = words;
  };
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(root.dataset.theme ?? "auto") + 1) % names.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    try {
      localStorage.setItem("outrider.theme", next);
    } catch {
      // Without storage the choice lasts until the page is closed.
    }
    show();
    announce(`Colours: ${THEMES[next]}.`);
  });
  show();
}

function startTint() {
  const tint = byId("tint");
  tint.checked = load("localStorage", "tint", true);
  const show = () => document.body.classList.toggle("is-tinted", tint.checked);
  tint.addEventListener("change", () => {
    save("localStorage", "tint", tint.checked);
    show();
  });
  show();
}

startTheme();
startTint();
startStrip();
startSettings();
startChat();
startRace();
startKey(showView);
watchRounds();
window.addEventListener("hashchange", showView);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented) return;
  if (byId("settings").matches(":modal")) return; // closes by itself
  if (hideRound()) return;
  if (isRunning()) stopRunning();
  else if (byId("settings").open) byId("settings").close();
});
showView();
currentModel().catch(() => {}); // the header says that there is no connection; sending tries again
