/** Making and finding elements. Text goes in as text and never as markup. */

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const button = (label, onclick, properties = {}) =>
  element("button", { type: "button", className: "quiet", textContent: label, onclick, ...properties });

/** Tells people who listen to the page. The same words twice are said twice. */
export function announce(text) {
  const status = byId("status");
  status.textContent = "";
  setTimeout(() => (status.textContent = text), 50);
}

/** Shows one of two buttons that stand at the same place. The keyboard's focus goes along. */
export function swapButtons(shown, hidden) {
  const hadFocus = document.activeElement === hidden;
  shown.hidden = false;
  hidden.hidden = true;
  if (hadFocus) shown.focus();
}

/** Calls `work` at most once a frame, or soon when the page is hidden and has no frames. */
export function oncePerFrame(work) {
  let isWaiting = false;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    const run = () => {
      isWaiting = false;
      work();
    };
    if (document.hidden) setTimeout(run, 250);
    else requestAnimationFrame(run);
  };
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that came without TLS from another machine have no clipboard, only the old way.
    const area = element("textarea", { value: text, className: "offscreen" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}
