// Everything whose box leaves the page to the right (a wide table scrolls in its own box), every figure without a
// drawing, every letter in a figure that is lower than 9 pixels or lies outside its figure.
() => {
  const width = document.documentElement.clientWidth;
  const charts = [...document.querySelectorAll(".chart")].filter((e) => e.checkVisibility());
  const inside = (text) => {
    const [box, frame] = [text.getBoundingClientRect(), text.closest(".chart").getBoundingClientRect()];
    return box.left >= frame.left - 2 && box.right <= frame.right + 2 && box.top >= frame.top - 2
      && box.bottom <= frame.bottom + 2;
  };
  const covered = (text) => {
    const box = text.getBoundingClientRect();
    return [...text.closest(".chart").querySelectorAll(".modebar-group")].map((e) => e.getBoundingClientRect())
      .some((bar) => bar.left < box.right && box.left < bar.right && bar.top < box.bottom && box.top < bar.bottom);
  };
  const texts = charts.flatMap((e) => [...e.querySelectorAll("text")])
    .filter((e) => e.checkVisibility() && e.textContent);
  return {
    page: document.documentElement.scrollWidth,
    wide: [...document.querySelectorAll("main *")].filter((e) => !e.closest(".tall") && !e.closest(".chart")
      && e.getBoundingClientRect().right > width + 1).map((e) => e.tagName + " " + e.textContent.slice(0, 40)),
    charts: charts.length,
    empty: charts.filter((e) => !e.querySelector(".main-svg") || e.getBoundingClientRect().width < 200).length,
    small: texts.filter((e) => parseFloat(getComputedStyle(e).fontSize) < 9).map((e) => e.textContent),
    covered: texts.filter(covered).map((e) => e.textContent),
    outside: texts.filter((e) => !inside(e)).map((e) => e.textContent),
  };
}
