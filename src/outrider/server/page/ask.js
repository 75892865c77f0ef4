/** One request from its start to its end, for the chat and for the race. Only one runs at a time on a page. */

import { complete } from "./api.js";
import { roundOf } from "./answer.js";
import { Meter } from "./meter.js";
import { currentModel } from "./model.js";
import { showAdvice } from "./settings.js";
import { showMeter } from "./strip.js";

let running = null;
const watchers = [];

export const isRunning = () => running !== null;
export const stopRunning = () => running?.abort();

/** Calls `watcher` whenever something begins or ends to run. */
export const watchRunning = (watcher) => watchers.push(watcher);

/**
 * Runs `work` with a signal that stopRunning() aborts.
 * @param {(signal: AbortSignal) => Promise<void>} work
 */
export async function runAlone(work) {
  if (running) throw new Error("something is running already");
  running = new AbortController();
  for (const watcher of watchers) watcher();
  try {
    await work(running.signal);
  } finally {
    running = null;
    for (const watcher of watchers) watcher();
  }
}

/** Asks with `messages`; rounds go to `text`. Gives {reason, meter}; `onStart` and `onRound` are told of the meter. */
export async function ask({ messages, body, text, signal, onStart = () => {}, onRound = () => {} }) {
  const model = await currentModel();
  signal.throwIfAborted();
  const meter = new Meter();
  onStart(meter);
  let reason = null;
  let usage = null;
  try {
    for await (const chunk of complete(...addressed(model, messages, body), signal)) {
      usage = chunk.usage ?? usage;
      if (!chunk.choices?.length) continue;
      const round = roundOf(chunk);
      if (round) {
        meter.add(round);
        text.add(round);
        showMeter(meter);
        onRound(meter);
      }
      reason = chunk.choices[0].stop_reason ?? chunk.choices[0].finish_reason ?? reason;
    }
  } finally {
    meter.close(usage);
    if (meter.rounds) showMeter(meter); // a request that was refused leaves the figures of the one before
  }
  if (usage) showAdvice(usage.speculation?.advice);
  return { reason, meter };
}

/** Path and body. A model without a chat template continues the last message as it stands. */
function addressed(model, messages, body) {
  const whole = { model: model.id, stream: true, stream_options: { include_usage: true }, ...body };
  if (model.chat !== false) return ["v1/chat/completions", { ...whole, messages }];
  return ["v1/completions", { ...whole, prompt: messages.at(-1).content }];
}
