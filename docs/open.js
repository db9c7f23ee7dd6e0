// Unfold the entry of the API that an address names.
const unfold = () =>
  document.getElementById(decodeURIComponent(location.hash.slice(1)))
    ?.parentElement.querySelector(":scope > details")?.setAttribute("open", "");
addEventListener("hashchange", unfold);
unfold();

// Mark tables and formulas that are wider than the page, until they are scrolled to their end. Their width may change with
// the window, a fold or a font; the observer is called in the frame of the change, before it is painted.
const mark = box => box.parentElement.classList.toggle("more", box.scrollLeft + 2 < box.scrollWidth - box.clientWidth);
const sizes = new ResizeObserver(entries => entries.forEach(({target}) => mark(target.closest(".wide").firstChild)));
const frame = () => document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset math[display="block"]').forEach(box => {
  if (box.parentElement.matches(".wide")) return;
  const wide = document.createElement("div");
  wide.className = "wide";
  box.replaceWith(wide);
  wide.append(box);
  box.addEventListener("scroll", () => mark(box));
  [box, box.querySelector("table") ?? box.firstElementChild].forEach(each => sizes.observe(each));
});
// Tables get their box from the theme, after this script.
new MutationObserver(frame).observe(document.querySelector("article") ?? document.body, {childList: true, subtree: true});
frame();
