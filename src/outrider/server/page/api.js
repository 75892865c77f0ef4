/** Talking to the server: requests, errors as one sentence, and server-sent events. */

import { load, save } from "./storage.js";

export class ServerError extends Error {
  constructor(message, status = 0) {
    super(sentence(message));
    this.status = status;
  }
}

export const readKey = () => load("sessionStorage", "key", "");
export const writeKey = (key) => save("sessionStorage", "key", key);

/** The first model of the server: {id, context, methods, method, chat}. */
export async function fetchModel() {
  const list = await (await request("v1/models")).json();
  if (!list.data?.length) throw new ServerError("The server has no model.");
  return list.data[0];
}

/** Posts `body` and yields the chunks of the answer. Aborting `signal` ends the request on the server too. */
export async function* complete(path, body, signal) {
  const response = await request(path, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    yield chunk;
  }
  throw new ServerError("The connection ended before the answer did; what came so far is kept.");
}

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (readKey()) headers.Authorization = `Bearer ${readKey()}`;
  const response = await reached(fetch(new URL(path, document.baseURI), { ...options, headers }));
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message;
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `The server answered with status ${response.status}.`;
  }
  const wait = response.headers.get("Retry-After");
  if (wait) message = `${sentence(message).slice(0, -1)} (try again in ${wait} s).`;
  return new ServerError(message, response.status);
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reached(reader.read());
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // ends the connection when the reader of the events leaves early
  }
}

/** Waits for the network. That it failed is told in plain words; that we aborted is passed on. */
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached; check that it is running and send again.");
  }
}

function sentence(text) {
  const words = String(text || "The server gave no reason").trim();
  return words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? "" : ".");
}
