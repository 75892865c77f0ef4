/** What happened in a round, shown for the one under the pointer, tapped, or reached with the arrow keys. */

import { roundAt } from "./answer.js";
import { byId, element } from "./dom.js";

let shown = null;

export function watchRounds() {
  document.addEventListener("pointerover", (event) => {
    if (event.pointerType === "touch") return;
    show(event.target.closest?.(".round") ?? focusedRound());
  });
  document.addEventListener("click", (event) => show(event.target.closest?.(".round") ?? null));
  document.addEventListener("focusin", (event) => show(event.target.closest?.(".round") ?? null));
  document.addEventListener("focusout", () => show(null));
  document.addEventListener("scroll", () => show(null), { capture: true, passive: true });
  document.addEventListener("keydown", walk);
}

/** Takes the details away; says whether there were any. */
export function hideRound() {
  const wasShown = shown !== null;
  show(null);
  return wasShown;
}

const focusedRound = () => document.activeElement?.closest?.(".round") ?? null;

/** The arrow keys go from round to round: one stop of the Tab key for an answer, not hundreds. */
function walk(event) {
  const here = event.target.closest?.(".round");
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  if (!here || !(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
  const all = [...here.closest(".answer-text").querySelectorAll(".round")].filter(isStop);
  const place = all.indexOf(roundAt(here).parts.find(isStop));
  const next = all[Math.min(Math.max(place + steps[event.key], 0), all.length - 1)];
  event.preventDefault();
  here.tabIndex = -1;
  next.tabIndex = 0;
  next.scrollIntoView({ block: "nearest" });
  next.focus({ preventScroll: true });
  requestAnimationFrame(() => show(next)); // after the scrolling, which takes the details away
}

/** A round over several lines is one stop, where it has something to see. */
function isStop(part) {
  const { parts } = roundAt(part);
  return part === (parts.find((other) => other.textContent.trim()) ?? parts[0]);
}

function show(part) {
  const info = part ? roundAt(part) : null;
  if (info === shown) return;
  const hint = byId("hint");
  for (const old of shown?.parts ?? []) {
    old.classList.remove("is-shown");
    old.removeAttribute("aria-describedby");
  }
  shown = info;
  hint.hidden = !info;
  if (!info) return;
  for (const now of info.parts) now.classList.add("is-shown");
  part.setAttribute("aria-describedby", "hint");
  hint.replaceChildren(...describe(info));
  place(hint, part.getClientRects()[0] ?? part.getBoundingClientRect());
}

function describe({ round, number }) {
  const of = (origin) => round.pieces.filter((piece) => piece[1] === origin).map((piece) => piece[0]);
  const head = round.drafted
    ? `Round ${number}: ${round.drafted} drafted, ${round.accepted} kept`
    : `Round ${number}: nothing drafted`;
  const rows = [
    ["kept", "Kept", of("kept")],
    ["refused", "Refused", round.refused],
    ["replaced", "Instead", of("replaced")],
    ["bonus", "Bonus", of("bonus")],
    ["plain", "Plain", of("plain")],
  ];
  return [
    element("p", { className: "hint-head", textContent: head }),
    ...rows
      .filter(([, , texts]) => texts.length)
      .map(([origin, label, texts]) =>
        element(
          "p",
          { className: "hint-row" },
          element("span", { className: "hint-label", textContent: label }),
          element("span", { className: "hint-tokens" }, ...texts.map((text) => token(text, origin))),
        ),
      ),
  ];
}

/** Line ends are made visible; tokens without text, such as the end of an answer, come by their number. */
function token(text, origin) {
  const visible = text.replaceAll("\n", "\u21b5").replace(/^token_id:/, "token ") || "\u2205";
  return element("span", { className: `token ${origin}`, textContent: visible });
}

/** Below the round, or above where there is no room; always inside the window. */
function place(hint, box) {
  const gap = 8;
  const width = hint.offsetWidth;
  const height = hint.offsetHeight;
  const left = Math.min(Math.max(gap, box.left), window.innerWidth - width - gap);
  const isBelow = box.bottom + gap + height < window.innerHeight;
  hint.style.left = `${left}px`;
  hint.style.top = `${isBelow ? box.bottom + gap : Math.max(gap, box.top - gap - height)}px`;
}
