/** The conversation: sending, stopping, regenerating, clearing; kept over a reload of the page. */

import { AnswerText } from "./answer.js";
import { ask, isRunning, runAlone, stopRunning, watchRunning } from "./ask.js";
import { announce, button, byId, copyText, element, swapButtons } from "./dom.js";
import { noteRefusal } from "./model.js";
import { Follower } from "./scroll.js";
import { samplingBody, settings, speculationBody } from "./settings.js";
import { load, save } from "./storage.js";

const REASONS = {
  stop: "complete",
  length: "token limit",
  cancelled: "stopped",
  deadline: "out of time",
  error: "broken off",
};

let turns = []; // {role, content} and of answers {rounds, reason, figures}
let follower = null;
let live = null; // the answer that is being written: {text, turn}

export function startChat() {
  follower = new Follower(byId("transcript"));
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("prompt").addEventListener("input", growPrompt);
  byId("stop").addEventListener("click", stopRunning);
  byId("clear").addEventListener("click", clear);
  for (const example of document.querySelectorAll(".example")) {
    example.addEventListener("click", () => putBack(example.textContent.trim()));
  }
  window.addEventListener("pagehide", () => {
    keep();
    save("sessionStorage", "typed", byId("prompt").value);
  });
  watchRunning(refresh);
  reopen();
}

/** After a reload. A question that had no word of an answer yet goes back into the field. */
function reopen() {
  const kept = load("sessionStorage", "conversation", []);
  const typed = load("sessionStorage", "typed", "");
  const isUnanswered = kept.at(-1)?.role === "assistant" && !kept.at(-1).reason && !kept.at(-1).content;
  if (isUnanswered) kept.pop();
  const question = isUnanswered ? kept.pop().content : "";
  restore(kept);
  if (question || typed) putBack(question, typed);
}

async function send() {
  const field = byId("prompt");
  const content = field.value.trim();
  if (!content || isRunning()) return;
  field.value = "";
  growPrompt();
  const turn = { role: "user", content };
  turns.push(turn);
  const shown = showQuestion(turn);
  const isAnswered = await answer();
  if (!isAnswered) {
    turns.splice(turns.indexOf(turn), 1);
    shown.remove();
    putBack(content, field.value);
    keep();
    refresh();
  }
}

async function regenerate() {
  if (isRunning() || turns.at(-1)?.role !== "assistant") return;
  const old = turns.pop();
  byId("transcript").focus({ preventScroll: true }); // the button goes with the old answer
  byId("turns").querySelector(".answer:last-of-type").remove();
  if (!(await answer())) {
    turns.push(old);
    showAnswer(old);
    byId("turns").append(...byId("turns").querySelectorAll(".notice")); // the error stays last
    keep();
    refresh();
  }
}

/** Lets the model answer what is there. False when nothing came: then the caller puts things back. */
async function answer() {
  const chosen = settings();
  const messages = turns.map(({ role, content }) => ({ role, content }));
  if (chosen.system.trim()) messages.unshift({ role: "system", content: chosen.system });
  const turn = { role: "assistant", content: "", rounds: [], reason: "", figures: [] };
  turns.push(turn);
  const { article, text } = showAnswer(turn);
  live = { text, turn };
  byId("turns").querySelector(".notice")?.remove();
  follower.jump();
  let failure = null;
  let meter = null;
  await runAlone(async (signal) => {
    try {
      const body = { ...samplingBody(chosen), speculation: speculationBody(chosen) };
      const watch = { onStart: (started) => (meter = started), onRound: () => follower.follow() };
      turn.reason = (await ask({ messages, body, text, signal, ...watch })).reason ?? "stop";
    } catch (error) {
      turn.reason = error.name === "AbortError" ? "cancelled" : "error";
      if (error.name !== "AbortError") failure = error;
    }
  });
  live = null;
  finish(turn, text, meter);
  const isLost = ["error", "cancelled"].includes(turn.reason) && text.rounds.length === 0;
  if (isLost) {
    turns.splice(turns.indexOf(turn), 1);
    article.remove();
  } else {
    showEnd(article, turn);
  }
  if (failure) showFailure(failure);
  else if (!isLost) announce(`Answer ${REASONS[turn.reason] ?? turn.reason}: ${turn.figures.slice(0, 2).join(", ")}.`);
  keep();
  refresh();
  follower.follow();
  return !isLost;
}

function finish(turn, text, meter) {
  turn.content = text.text;
  turn.rounds = text.rounds;
  turn.figures = meter?.summary() ?? [];
}

function showQuestion(turn) {
  const article = element(
    "article",
    { className: "turn question", "aria-label": "You" },
    element("div", { className: "question-text", textContent: turn.content }),
  );
  byId("turns").append(article);
  return article;
}

function showAnswer(turn) {
  const text = new AnswerText("Answer; the arrow keys go from round to round");
  const article = element("article", { className: "turn answer", "aria-label": "Answer" }, text.element);
  for (const round of turn.rounds) text.add(round);
  byId("turns").append(article);
  if (turn.reason) showEnd(article, turn);
  else article.classList.add("is-live");
  return { article, text };
}

/** Below an answer: how it ended, its figures, and what can be done with it. */
function showEnd(article, turn) {
  article.classList.remove("is-live");
  if (!turn.content) article.prepend(element("p", { className: "empty-answer", textContent: "(no text)" }));
  const copy = button("Copy", async () => {
    await copyText(turn.content);
    copy.textContent = "Copied";
    announce("Answer copied.");
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const reason = element("span", {
    className: `reason reason-${turn.reason}`,
    textContent: REASONS[turn.reason] ?? turn.reason,
    title: `Finish reason: ${turn.reason}`,
  });
  const figures = turn.figures.map((figure) => element("span", { className: "figure", textContent: figure }));
  article.append(
    element(
      "footer",
      { className: "turn-end" },
      element("p", { className: "figures" }, reason, ...figures),
      element("div", { className: "actions" }, copy, button("Regenerate", regenerate, { className: "quiet again" })),
    ),
  );
}

function showFailure(error) {
  noteRefusal(error);
  byId("turns").append(element("p", { className: "notice", role: "alert", textContent: error.message }));
}

function clear() {
  if (isRunning()) stopRunning();
  const old = turns;
  if (live) finish(live.turn, live.text, null);
  restore([]);
  keep();
  const undo = button("Undo", () => {
    restore(old.filter((turn) => turn.role === "user" || turn.content));
    keep();
  });
  byId("turns").append(element("p", { className: "notice calm" }, "Conversation cleared. ", undo));
  byId("prompt").focus();
}

function restore(kept) {
  turns = kept;
  byId("turns").replaceChildren();
  for (const turn of turns) {
    if (turn.role === "user") showQuestion(turn);
    else showAnswer({ ...turn, reason: turn.reason || "cancelled" });
  }
  refresh();
  follower.jump();
}

/** Keeps the conversation; without the rounds' details where it grew too large for the browser. */
function keep() {
  if (live) finish(live.turn, live.text, null);
  if (save("sessionStorage", "conversation", turns)) return;
  const slim = turns.map((turn) => ({ ...turn, ...(turn.rounds && { rounds: [wholeRound(turn.content)] }) }));
  save("sessionStorage", "conversation", slim);
}

const wholeRound = (text) => ({ pieces: [[text, "plain"]], count: 1, drafted: 0, accepted: 0, refused: [] });

/** Text goes back into the field, before what was typed since. */
function putBack(content, typed = "") {
  const field = byId("prompt");
  field.value = [content, typed].filter(Boolean).join("\n");
  growPrompt();
  if (byId("key-bar").hidden) field.focus();
}

function growPrompt() {
  const field = byId("prompt");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function refresh() {
  const isBusy = isRunning();
  swapButtons(...(isBusy ? [byId("stop"), byId("send")] : [byId("send"), byId("stop")]));
  byId("clear").disabled = turns.length === 0;
  byId("welcome").hidden = turns.length > 0;
  byId("turns").setAttribute("aria-busy", String(isBusy));
  const answers = byId("turns").querySelectorAll(".again");
  answers.forEach((again, place) => (again.hidden = place < answers.length - 1 || isBusy));
}
