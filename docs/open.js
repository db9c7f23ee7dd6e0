// Unfold the entry of the API that an address names.
const unfold = () =>
  document.getElementById(decodeURIComponent(location.hash.slice(1)))
    ?.parentElement.querySelector(":scope > details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
unfold();
