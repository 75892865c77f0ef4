/** The model of the server, asked for once, and the field for an API key where the server wants one. */

import { fetchModel, readKey, writeKey } from "./api.js";
import { byId } from "./dom.js";
import { offerMethods } from "./settings.js";

let model = null;

export async function currentModel() {
  if (model) return model;
  try {
    model = await fetchModel();
  } catch (error) {
    noteRefusal(error);
    byId("model").textContent = error.status === 401 ? "needs an API key" : "no connection";
    throw error;
  }
  byId("key-bar").hidden = true;
  byId("model").textContent = model.id;
  const context = model.context ? `${model.context.toLocaleString("en")} tokens` : "";
  byId("context").textContent = context && `${context} of context`;
  byId("about-model").textContent = model.id;
  byId("about-context").textContent = context || "not known";
  byId("no-template").hidden = model.chat !== false;
  document.title = `${model.id} \u2013 Outrider`;
  offerMethods(model);
  return model;
}

/** Where the server asked for a key, the field for it comes up. */
export function noteRefusal(error) {
  if (error.status !== 401) return;
  byId("key-note").textContent = readKey()
    ? "The server does not know this API key. Give another:"
    : "This server asks for an API key:";
  byId("key-bar").hidden = false;
  byId("key").focus();
}

export function startKey(onChange) {
  byId("key-bar").addEventListener("submit", async (event) => {
    event.preventDefault();
    writeKey(byId("key").value.trim());
    model = null;
    try {
      await currentModel();
      byId("key").value = "";
      onChange();
    } catch {
      // The field stays, with a note that says why.
    }
  });
}
