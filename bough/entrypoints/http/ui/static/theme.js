// Runs before the page is drawn, so that it never flashes in the wrong colours.
(() => {
  let chosen = "system";
  try {
    chosen = localStorage.getItem("bough.theme") || "system";
  } catch {
    // storage is switched off: the system's choice it is
  }
  document.documentElement.dataset.theme = chosen;
})();
