// Unfold the entry of the API that an address names.
const unfold = () =>
  document.getElementById(decodeURIComponent(location.hash.slice(1)))
    ?.parentElement.querySelector(":scope > details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
unfold();

// Mark tables and formulas that are wider than the page, until they are scrolled to their end.
const mark = () => document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset math[display="block"]').forEach(box => {
  if (!box.parentElement.matches(".wide")) {  // tables get their box from the theme, after this script
    const frame = document.createElement("div");
    frame.className = "wide";
    box.replaceWith(frame);
    frame.append(box);
    box.addEventListener("scroll", mark);
  }
  box.parentElement.classList.toggle("more", box.scrollLeft + 2 < box.scrollWidth - box.clientWidth);
});
["resize", "load"].forEach(event => addEventListener(event, mark));
document.addEventListener("toggle", mark, true);
new MutationObserver(mark).observe(document.querySelector("article") ?? document.body, {childList: true, subtree: true});
mark();
