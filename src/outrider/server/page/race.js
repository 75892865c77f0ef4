/** The race: one prompt, speculative and plain, one after the other; the texts compared and the speeds too. */

import { AnswerText } from "./answer.js";
import { ask, isRunning, runAlone, stopRunning, watchRunning } from "./ask.js";
import { announce, byId, element, swapButtons } from "./dom.js";
import { noteRefusal } from "./model.js";
import { number } from "./meter.js";
import { Follower } from "./scroll.js";
import { samplingBody, settings, speculationBody } from "./settings.js";
import { showMeter, showRace } from "./strip.js";

const followers = {};

export function startRace() {
  for (const name of ["speculative", "plain"]) {
    followers[name] = new Follower(byId(`lane-${name}`).querySelector(".lane-text"));
  }
  byId("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    race();
  });
  byId("race-prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    race();
  });
  byId("race-cancel").addEventListener("click", stopRunning);
  watchRunning(refresh);
}

function refresh() {
  const [start, cancel] = [byId("race-start"), byId("race-cancel")];
  swapButtons(...(isRunning() ? [cancel, start] : [start, cancel]));
}

async function race() {
  const prompt = byId("race-prompt").value.trim();
  if (!prompt || isRunning()) return;
  const chosen = drawn();
  const messages = [{ role: "user", content: prompt }];
  if (chosen.system.trim()) messages.unshift({ role: "system", content: chosen.system });
  const lanes = [
    new Lane("speculative", speculationBody(chosen)),
    new Lane("plain", { off: true, trace: true }),
  ];
  byId("lanes").hidden = false;
  verdict("");
  await runAlone(async (signal) => {
    try {
      for (const lane of lanes) await lane.run(messages, samplingBody(chosen), signal);
      judge(...lanes);
    } catch (error) {
      if (error.name === "AbortError") return verdict("Cancelled.", "calm");
      noteRefusal(error);
      verdict(error.message, "bad");
    }
  });
}

/** The settings, made to draw the same text twice: no temperature, or a seed. */
function drawn() {
  const chosen = settings();
  if (byId("race-greedy").checked) return { ...chosen, temperature: 0 };
  return { ...chosen, seed: chosen.seed ?? 1 };
}

class Lane {
  constructor(name, speculation) {
    this.follower = followers[name];
    this.lane = byId(`lane-${name}`);
    this.speculation = speculation;
    this.text = new AnswerText(`Text of the ${name} run; the arrow keys go from round to round`);
    this.meter = null;
    this.lane.querySelector(".lane-text").replaceChildren(this.text.element);
    this.lane.classList.remove("is-live", "is-first");
    this.follower.jump();
    this.#show();
  }

  async run(messages, sampling, signal) {
    this.lane.classList.add("is-live");
    const ticking = setInterval(() => this.#show(), 100);
    try {
      const body = { ...sampling, speculation: this.speculation };
      const watch = { onStart: (meter) => (this.meter = meter), onRound: () => this.follower.follow() };
      await ask({ messages, body, text: this.text, signal, ...watch });
    } finally {
      clearInterval(ticking);
      this.lane.classList.remove("is-live");
      this.#show();
    }
  }

  #show() {
    const put = (name, text) => (this.lane.querySelector(`.lane-${name}`).textContent = text);
    put("time", this.meter ? `${this.meter.seconds.toFixed(1)} s` : "waiting");
    put("rate", this.meter?.tokensPerSecond ? `${number(this.meter.tokensPerSecond)} tokens/s` : "");
    put("count", this.meter ? `${this.meter.tokens} tokens in ${this.meter.rounds} rounds` : "");
  }
}

function judge(speculative, plain) {
  const ratio = speculative.meter.tokensPerSecond / plain.meter.tokensPerSecond;
  const isMeasured = speculative.meter.isTimed && plain.meter.isTimed;
  showMeter(speculative.meter);
  const place = firstDifference(speculative.text.text, plain.text.text);
  if (isMeasured) {
    showRace(ratio);
    (ratio >= 1 ? speculative : plain).lane.classList.add("is-first");
  }
  if (place !== null) {
    for (const lane of [speculative, plain]) lane.text.markFrom(place);
  }
  const texts = place === null ? "The texts are identical." : `The texts differ from character ${place + 1} on.`;
  const note = isMeasured ? "" : " They are too short to compare the speeds.";
  verdict(texts + note, place === null ? "good" : "bad", isMeasured ? `${ratio.toFixed(2)}\u00d7` : "");
}

function firstDifference(one, other) {
  if (one === other) return null;
  let place = 0;
  while (place < one.length && one[place] === other[place]) place += 1;
  return place;
}

function verdict(text, mood = "", speed = "") {
  const box = byId("verdict");
  box.hidden = !text;
  box.className = `verdict ${mood}`;
  box.replaceChildren();
  if (!text) return;
  box.append(element("p", { className: "verdict-text", textContent: text }));
  if (speed) {
    const words = "the plain speed, in tokens per second after the first round";
    box.append(
      element("p", { className: "verdict-speed" }, element("strong", { textContent: speed }), ` ${words}`),
    );
  }
  announce(speed ? `${text} ${speed} the plain speed.` : text);
}
