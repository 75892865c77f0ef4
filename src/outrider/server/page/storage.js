/** What the browser keeps for the page. Storage may be full or off: then nothing is kept, and nothing breaks. */

export function load(storage, name, fallback) {
  try {
    return JSON.parse(window[storage].getItem(`outrider.${name}`)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Says whether it was kept. */
export function save(storage, name, value) {
  try {
    window[storage].setItem(`outrider.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
