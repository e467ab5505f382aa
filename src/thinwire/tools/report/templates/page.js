"use strict";
(async () => {
  // Tables: sort by a column, copy as CSV.
  const value = (cell) => cell.dataset.value ?? cell.textContent.trim();
  const compare = (a, b) => {
    const [x, y] = [Number(a), Number(b)];
    const [known, other] = [a !== "" && !Number.isNaN(x), b !== "" && !Number.isNaN(y)];
    if (known && other) return x - y;
    return known === other ? a.localeCompare(b) : known ? -1 : 1;
  };
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const each of heads) each.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].sort((a, b) => compare(value(a.cells[column]), value(b.cells[column])));
        body.append(...(down ? rows.reverse() : rows));
      });
    });
  }
  // Some columns are for those who ask for them.
  for (const button of document.querySelectorAll(".more")) {
    const table = button.closest(".table").querySelector("table");
    const labels = ["All columns", "Fewer columns"];
    const show = (all) => {
      for (const row of table.rows) {
        [...row.cells].forEach((cell, column) => { cell.hidden = !all && column >= Number(button.dataset.first); });
      }
      button.textContent = labels[Number(all)];
      button.setAttribute("aria-expanded", String(all));
    };
    button.addEventListener("click", () => show(button.getAttribute("aria-expanded") !== "true"));
    show(false);
  }
  const quote = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const csv = (table) =>
    [...table.rows].map((row) => [...row.cells].map((cell) => quote(value(cell))).join(",")).join("\n") + "\n";
  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      // A page opened from a file may not have the clipboard interface.
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
  };
  for (const button of document.querySelectorAll(".copy")) {
    const label = button.textContent;
    button.addEventListener("click", async () => {
      await copy(csv(button.closest(".table").querySelector("table")));
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = label; }, 1500);
    });
  }

  // Files inside the page.
  const offer = (blob, name) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const packed = (script) => new Blob([Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0))]);
  const unpacks = typeof DecompressionStream !== "undefined";
  const unpacked = (script) => new Response(packed(script).stream().pipeThrough(new DecompressionStream("gzip")));
  for (const button of document.querySelectorAll("[data-download]")) {
    button.addEventListener("click", async () => {
      const [file, name] = [button.nextElementSibling, button.dataset.download];
      if (unpacks) offer(await unpacked(file).blob(), name);
      else offer(packed(file), `${name}.gz`);
    });
  }

  // Plotly, if there are plots.
  const plotly = document.getElementById("plotly");
  if (!plotly) return;
  if (!unpacks) {
    for (const chart of document.querySelectorAll(".chart")) {
      chart.textContent = "This browser is too old to draw the plots. The tables have the numbers.";
      chart.style.height = "auto";
    }
    return;
  }
  const script = document.createElement("script");
  script.textContent = await unpacked(plotly).text();
  document.head.append(script);

  const coarse = matchMedia("(pointer: coarse)").matches;
  const config = {
    responsive: true,
    displayModeBar: false,
  };
  const plots = new Map();

  // Plots: each stands before the JSON it is made from. Switches choose other data and axes for its traces.
  for (const script of document.querySelectorAll("script[data-for]")) {
    const box = document.getElementById(script.dataset.for);
    const { figure, views } = await unpacked(script).json();
    const bar = document.querySelector(`[data-switches="${box.id}"]`);
    const chosen = (axis) => {
      const key = bar.querySelector(`[data-axis="${axis}"] input:checked`).value;
      return views[axis].find((choice) => choice.key === key);
    };
    const draw = () => {
      // A finger scrolls the page; only a mouse draws zoom boxes.
      const layout = { ...figure.layout, autosize: true, ...(coarse ? { dragmode: false } : {}) };
      if (!views) return Plotly.react(box, figure.data, layout, config);
      const [y, x] = [chosen("y"), chosen("x")];
      const data = figure.data.map((trace, i) => {
        const columns = views.columns[y.key][i];
        const visible = box.data?.[i].visible ?? true;
        return { ...trace, visible, x: columns[x.key], y: columns.y, text: columns.text };
      });
      // Plotly fills in what it is given: every view starts from a copy.
      return Plotly.react(box, data, structuredClone({ ...layout, ...x.layout, ...y.layout }), config);
    };
    plots.set(box.id, { box, height: box.style.height });
    draw();
    bar?.addEventListener("change", draw);
  }

  document.documentElement.dataset.drawn = "";

  // One legend for all plots.
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const name = button.dataset.series;
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const { box } of plots.values()) {
        const hit = box.data.map((trace, i) => (trace.meta === name ? i : -1)).filter((i) => i >= 0);
        if (hit.length) Plotly.restyle(box, { visible: shown }, hit);
      }
    });
  }

  // Paper is narrower than a screen, 182 mm between the margins of A4, and two plots and more should fit on a page.
  const paper = { width: 680, height: 235, row: 0.85 };
  addEventListener("beforeprint", () => {
    for (const { box, height } of plots.values()) {
      box.style.height = "rows" in box.dataset ? `${paper.row * parseFloat(height)}px` : `${paper.height}px`;
      Plotly.relayout(box, { width: paper.width, height: parseFloat(box.style.height), autosize: false });
    }
  });
  addEventListener("afterprint", () => {
    for (const { box, height } of plots.values()) {
      box.style.height = height;
      Plotly.relayout(box, { width: null, height: null, autosize: true });
    }
  });
})();
