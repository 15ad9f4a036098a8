"use strict";
(() => {
  const narrow = () => window.innerWidth < 640;
  const draw = (holder) => {
    const figure = JSON.parse(document.getElementById(holder.dataset.figure).textContent);
    if (narrow() && figure.layout.title) {
      // a phone has no room for long titles inside the picture: they stand above it
      holder.before(Object.assign(document.createElement("p"), { className: "note", textContent: plain(figure.layout.title) }));
      delete figure.layout.title;
      const entries = figure.data.filter((trace) => trace.name && trace.showlegend !== false).length;
      figure.layout.margin.t = entries > 1 ? 30 + 19 * Math.ceil(entries / 2) : 24;
      Object.assign(figure.layout.font, { size: 10 });
      // what has no room beside the markers: the ticks and the hover say it too
      figure.data = figure.data.filter((trace) => trace.mode !== "text");
      figure.layout.annotations = (figure.layout.annotations || []).filter((one) => one.name !== "wide");
      for (const [name, axis] of Object.entries(figure.layout)) {
        if (/^[xy]axis/.test(name) && axis.title && axis.title.text) axis.title.text = axis.title.text.split(" (")[0];
      }
      const meta = figure.layout.meta || {};
      if (meta.stack) stack(figure.layout);
      if (meta.wide) {
        holder.parentElement.classList.add("wide");
        holder.style.minWidth = `${meta.wide}px`;
      }
    }
    Plotly.newPlot(holder, figure.data, figure.layout, { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] })
      .then(() => { holder.dataset.drawn = "yes"; });
  };
  const plain = (title) => {
    const box = document.createElement("textarea");
    box.innerHTML = [title.text, title.subtitle && title.subtitle.text].filter(Boolean).join(" — ").replace(/<[^>]*>/g, "");
    return box.value;
  };
  const stack = (layout) => {
    Object.assign(layout.xaxis, { domain: [0, 1], anchor: "y" });
    Object.assign(layout.xaxis2, { domain: [0, 1], anchor: "y2" });
    Object.assign(layout.yaxis, { domain: [0.6, 1], anchor: "x" });
    Object.assign(layout.yaxis2, { domain: [0, 0.4], anchor: "x2" });
    delete layout.grid;
    layout.height *= 1.5;
    layout.margin.t += 10;
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll("[data-figure]").forEach((holder) => seen.observe(holder));
  window.addEventListener("beforeprint", () => document.querySelectorAll("[data-figure]:not([data-drawn])").forEach(draw));

  const table = document.getElementById("sites");
  if (!table) return;
  const body = table.tBodies[0];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  table.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
    const head = button.closest("th");
    const down = head.getAttribute("aria-sort") === "ascending";
    table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].sort((a, b) => {
      const x = key(a, head.cellIndex), y = key(b, head.cellIndex);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number(Number.isNaN(x)) - Number(Number.isNaN(y));
      const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
      return down ? -order : order;
    });
    body.append(...rows);
  }));
  const words = document.getElementById("filter"), only = document.getElementById("only");
  const filter = () => {
    const wanted = words.value.trim().toLowerCase();
    for (const row of body.rows) {
      row.hidden = (wanted && !row.cells[0].textContent.toLowerCase().includes(wanted)) || (only.checked && row.dataset.verdict !== "diverged");
    }
  };
  words.addEventListener("input", filter);
  only.addEventListener("change", filter);
})();
