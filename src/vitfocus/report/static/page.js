"use strict";
(() => {
  const root = document.documentElement;
  const remembered = (() => { try { return localStorage.getItem("vitfocus-theme"); } catch { return null; } })();
  const button = document.getElementById("theme");
  const order = ["auto", "light", "dark"];
  let theme = order.includes(remembered) ? remembered : "auto";

  function showTheme() {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.querySelector("span").textContent = theme;
    button.title = `Colours: ${theme}. Click for the next.`;
    document.dispatchEvent(new CustomEvent("themechange"));
  }
  button.addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    try { localStorage.setItem("vitfocus-theme", theme); } catch { /* a page from disk may have no storage */ }
    showTheme();
  });
  showTheme();

  // Two pages in one file: the address after # says which is shown.
  const pages = ["report", "explorer"].map((id) => document.getElementById(id)).filter(Boolean);
  function showPage() {
    if (pages.length < 2) return;
    const explorer = location.hash.split("?")[0] === "#explorer";
    for (const page of pages) page.hidden = (page.id === "explorer") !== explorer;
    const toc = document.querySelector("nav.toc");
    if (toc) toc.hidden = explorer;
    for (const tab of document.querySelectorAll("nav.tabs a")) {
      if ((tab.getAttribute("href") === "#explorer") === explorer) tab.setAttribute("aria-current", "page");
      else tab.removeAttribute("aria-current");
    }
    if (explorer) { window.scrollTo(0, 0); document.dispatchEvent(new CustomEvent("explorershown")); }
  }
  window.addEventListener("hashchange", showPage);
  showPage();

  // A figure that is wider than the window can be scrolled by the keyboard.
  function showScrolling() {
    for (const box of document.querySelectorAll("figure .wide")) {
      if (box.scrollWidth > box.clientWidth) { box.tabIndex = 0; box.setAttribute("role", "region"); box.setAttribute("aria-label", box.querySelector("svg")?.getAttribute("aria-label") ?? "figure"); }
      else for (const name of ["tabindex", "role", "aria-label"]) box.removeAttribute(name);
    }
  }
  window.addEventListener("resize", showScrolling);
  showScrolling();

  // Tables that can be sorted: by a click on a heading, or by the list above the table where headings do not fit.
  for (const box of document.querySelectorAll(".sortable")) {
    const table = box.querySelector("table"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
    const list = box.parentElement.querySelector(".sorting select");
    const valueOf = (row, i) => { const cell = row.cells[i], text = cell.dataset.value ?? cell.textContent; return text === "" ? null : Number.isNaN(Number(text)) ? text : Number(text); };
    function sort(i, down) {
      const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
      const rows = [...body.rows].map((row) => [row, valueOf(row, i)]);
      rows.sort(([, a], [, b]) => (a === null ? (b === null ? 0 : 1) : b === null ? -1 : (down ? -1 : 1) * order(a, b)));  // what is not known comes last
      body.append(...rows.map(([row]) => row));
      heads.forEach((head, j) => (j === i ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
      list.value = String(i);
    }
    const numbers = (i) => [...body.rows].some((row) => typeof valueOf(row, i) === "number");
    heads.forEach((head, i) => head.querySelector("button").addEventListener("click", () => sort(i, head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : numbers(i))));
    list.addEventListener("change", () => sort(Number(list.value), numbers(Number(list.value))));
  }

  function save(name, type, content) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  }

  function rowsOf(pressed, table) {
    if (pressed.dataset.csv) return JSON.parse(pressed.dataset.csv);
    return [...table.rows].map((row) => [...row.cells].map((cell) => cell.dataset.value ?? cell.textContent));
  }
  function csv(rows) {
    const quote = (value) => { const text = String(value ?? ""); return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
    return rows.map((row) => row.map(quote).join(",")).join("\r\n") + "\r\n";
  }

  // A saved figure stands alone: the page's light colours are written into every element.
  const KEPT = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight"];
  function standalone(svg) {
    const before = root.dataset.theme;
    root.dataset.theme = "light";
    const copy = svg.cloneNode(true);
    const from = svg.querySelectorAll("*"), to = copy.querySelectorAll("*");
    from.forEach((element, index) => {
      const style = getComputedStyle(element);
      if (["g", "title"].includes(element.tagName)) return;
      for (const key of KEPT) {
        if (key.startsWith("font") && element.tagName !== "text") continue;
        const value = style.getPropertyValue(key);
        if (value && !to[index].hasAttribute(key)) to[index].setAttribute(key, value);
      }
      to[index].removeAttribute("class");
    });
    if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before;
    const [, , width, height] = svg.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    copy.removeAttribute("style");
    copy.removeAttribute("class");
    const paper = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of [["width", width], ["height", height], ["fill", "#fff"]]) paper.setAttribute(key, value);
    copy.insertBefore(paper, copy.firstChild);
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + new XMLSerializer().serializeToString(copy);
  }

  document.addEventListener("click", (event) => {
    const pressed = event.target.closest("button[data-save]");
    if (!pressed) return;
    const block = pressed.closest(".block");
    if (pressed.dataset.save === "csv") save(`${pressed.dataset.name}.csv`, "text/csv", csv(rowsOf(pressed, block.querySelector("table"))));
    else save(`${pressed.dataset.name}.svg`, "image/svg+xml", standalone(block.querySelector("svg")));
  });
})();
