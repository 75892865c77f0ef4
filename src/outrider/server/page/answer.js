/** The text of one answer: its rounds, tinted by where each token came from. */

import { element } from "./dom.js";

const ORIGINS = ["kept", "replaced", "bonus", "plain"];
const infoOf = new WeakMap(); // element of a round -> {round, number, parts}

/** What a chunk brought: {pieces: [[text, origin], ...], count, drafted, accepted, refused}; null when nothing. */
export function roundOf(chunk) {
  const choice = chunk.choices[0];
  const trace = chunk.speculation ?? null;
  const text = choice.delta?.content ?? choice.text ?? "";
  if (!text && !trace?.tokens?.length) return null;
  const tokens = trace?.tokens ?? [];
  return {
    pieces: split(text, tokens),
    count: trace ? tokens.length : 1,
    drafted: trace?.drafted ?? 0,
    accepted: trace?.accepted ?? 0,
    refused: trace?.refused ?? [],
  };
}

/** Gives the text its origins. The text counts: what no token explains (it was held back before) stays plain. */
function split(text, tokens) {
  const pieces = [];
  let rest = text;
  for (const token of tokens) {
    if (!token.text || !rest.startsWith(token.text)) continue;
    pieces.push([token.text, ORIGINS.includes(token.origin) ? token.origin : "plain"]);
    rest = rest.slice(token.text.length);
  }
  if (rest) pieces.push([rest, "plain"]);
  return pieces;
}

export const roundAt = (node) => infoOf.get(node) ?? null;

/** Grows by appending only. Every line of text is a block of its own, so that a long answer is never laid out anew. */
export class AnswerText {
  constructor(label) {
    this.element = element("div", { className: "answer-text", role: "group", "aria-label": label });
    this.rounds = [];
    this.text = "";
    this.line = null;
  }

  add(round) {
    this.rounds.push(round);
    const info = { round, number: this.rounds.length, parts: [] };
    for (const [text, origin] of merged(round.pieces)) {
      this.text += text;
      for (const part of text.split(/(?<=\n)/)) this.#append(part, origin, info);
    }
  }

  #append(text, origin, info) {
    if (!this.line) {
      this.line = element("div", { className: "line" });
      this.element.append(this.line);
    }
    let part = this.line.lastElementChild;
    if (!part || infoOf.get(part) !== info) {
      part = element("span", { className: "round", tabIndex: this.element.querySelector(".round") ? -1 : 0 });
      infoOf.set(part, info);
      info.parts.push(part);
      this.line.append(part);
    }
    part.append(element("span", { className: origin, textContent: text }));
    if (text.endsWith("\n")) this.line = null;
  }

  /** Marks the text from character `index` on, where two answers differ. */
  markFrom(index) {
    let seen = 0;
    for (const span of this.element.querySelectorAll(".round > span")) {
      const length = span.textContent.length;
      if (seen + length > index) {
        const cut = Math.max(0, index - seen);
        const text = span.textContent;
        const mark = element("mark", { textContent: text.slice(cut) });
        span.replaceChildren(text.slice(0, cut), mark);
        return;
      }
      seen += length;
    }
    this.element.append(element("mark", { textContent: "(ends here)" }));
  }
}

function merged(pieces) {
  const joined = [];
  for (const [text, origin] of pieces) {
    const last = joined.at(-1);
    if (last?.[1] === origin) last[0] += text;
    else joined.push([text, origin]);
  }
  return joined;
}
