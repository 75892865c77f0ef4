// Loaded before the first paint, so that a chosen colour scheme does not flash.
(function () {
  let theme = null;
  try {
    theme = localStorage.getItem("outrider.theme");
  } catch {
    // Without storage the page follows the system.
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
