"use strict";
// Draws the figures that the page holds, and makes its tables sort, search and download.

const SHOWN = 200;
const AROUND = 12;
// Pixels that a number, a turned number and a letter take below the tracks.
const NUMBER = 32, LINE = 13, LETTER = 11;
const read = (element) => JSON.parse(element.textContent);

for (const section of document.querySelectorAll("section")) setUp(section);

function setUp(section) {
  const figures = [...section.querySelectorAll(".figure")];
  const name = section.dataset.file;
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      observer.unobserve(entry.target);
      draw(entry.target, name);
    }
  }, { rootMargin: "600px" });
  figures.forEach((figure) => observer.observe(figure));
  for (const format of ["svg", "png"]) {
    section.querySelector(`button.${format}`).addEventListener("click", async () => {
      for (const figure of figures) {
        await draw(figure, name);
        const size = { width: figure.clientWidth, height: figure.clientHeight, scale: format === "png" ? 2 : 1 };
        await Plotly.downloadImage(figure, { format, filename: `${name}_${figure.id}`, ...size });
      }
    });
  }
  if (section.querySelector("table")) setUpTable(section, name);
}

function draw(figure, name) {
  if (!figure.drawn) {
    const { data, layout } = read(document.getElementById(`${figure.id}-data`));
    const config = {
      responsive: true,
      displaylogo: false,
      // Nothing that would send data away.
      plotlyServerURL: "",
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d"], ["zoomIn2d", "zoomOut2d", "resetScale2d"]],
      toImageButtonOptions: { format: "svg", filename: `${name}_${figure.id}` },
    };
    figure.drawn = Plotly.newPlot(figure, data, layout, config).then(() => {
      if (!layout.meta) return;
      letters(figure, layout.meta);
      figure.on("plotly_relayout", (changed) => {
        if (Object.keys(changed).some((key) => key.startsWith("xaxis.range") || key === "xaxis.autorange"))
          letters(figure, layout.meta);
      });
    });
  }
  return figure.drawn;
}

// Round positions below the tracks, those that follow positions left out, and every residue once there is room for it.
function letters(figure, { positions, letters }) {
  const [low, high] = figure.layout.xaxis.range;
  const first = Math.max(0, Math.ceil(low)), last = Math.min(positions.length - 1, Math.floor(high));
  const count = Math.max(1, last - first + 1);
  const room = figure.querySelector(".nsewdrag").getBoundingClientRect().width / count;
  const step = [1, 5, 10, 20, 50, 100, 200, 500, 1000].find((one) => one * room > NUMBER) || 5000;
  const begins = [], round = [];
  for (let at = first; at <= last; at++) {
    if (at === first || positions[at] !== positions[at - 1] + 1) begins.push(at);
    if (positions[at] % step === 0 || count <= step) round.push(at);
  }
  const wanted = begins.length > 1 ? [...begins, ...round] : round;
  let numbered = apart(wanted, NUMBER / room);
  // Where numbers beside each other have no room, they are turned.
  const upright = begins.length > 1 && begins.some((at) => !numbered.has(at));
  if (upright) numbered = apart(wanted, LINE / room);
  const tickvals = [], ticktext = [];
  for (let at = first; at <= last; at++) {
    const number = numbered.has(at) ? positions[at] : "";
    if (number === "" && (upright || room <= LETTER)) continue;
    tickvals.push(at);
    if (upright) ticktext.push(`${letters[at]}${number}`);
    else ticktext.push((room > LETTER ? `${letters[at] || "&nbsp;"}<br>` : "") + (number === "" ? "&nbsp;" : number));
  }
  Plotly.relayout(figure, { "xaxis.tickmode": "array", "xaxis.tickvals": tickvals, "xaxis.ticktext": ticktext, "xaxis.tickangle": upright ? -90 : 0 });
}

// Those of the wanted columns that are far enough from all before them in the list.
function apart(wanted, least) {
  const chosen = new Set();
  for (const at of wanted)
    if ([...chosen].every((other) => other === at || Math.abs(other - at) >= least)) chosen.add(at);
  return chosen;
}

function setUpTable(section, name) {
  const { columns, rows, position } = read(section.querySelector("script.table"));
  const at = columns.indexOf(position);
  const tracks = section.querySelector(".tracks");
  const input = section.querySelector("input"), found = section.querySelector(".found");
  const numeric = columns.map((_, column) => rows.every((row) => row[column] === null || typeof row[column] === "number"));
  const texts = rows.map((row) => row.join("\t").toLowerCase());
  let order = rows.map((_, index) => index), shown = order, sorted = { column: -1, sign: 1 };

  const head = section.querySelector("thead tr"), body = section.querySelector("tbody");
  columns.forEach((column, index) => {
    const cell = head.appendChild(document.createElement("th"));
    cell.textContent = column;
    cell.className = numeric[index] ? "number" : "";
    cell.tabIndex = 0;
    const sort = () => {
      sorted = { column: index, sign: sorted.column === index ? -sorted.sign : 1 };
      order.sort((a, b) => sorted.sign * compare(rows[a][index], rows[b][index]));
      [...head.children].forEach((one) => one.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", sorted.sign > 0 ? "ascending" : "descending");
      search();
    };
    cell.addEventListener("click", sort);
    cell.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });

  function search() {
    const words = input.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    // A number alone is a position.
    const place = words.length === 1 && at >= 0 && /^-?\d+$/.test(words[0]) ? words[0] : null;
    shown = order.filter((index) => place !== null
      ? String(rows[index][at]).split(":").includes(place)
      : words.every((word) => texts[index].includes(word)));
    fill();
    const places = new Set(shown.map((index) => rows[index][at]));
    if (words.length && places.size === 1) go([...places][0]);
    else clear();
  }

  function fill() {
    body.replaceChildren(...shown.slice(0, SHOWN).map((index) => {
      const row = document.createElement("tr");
      rows[index].forEach((value, column) => {
        const cell = row.appendChild(document.createElement("td"));
        cell.textContent = value === null ? "" : typeof value === "number" && !Number.isInteger(value) ? value.toFixed(4) : value;
        cell.className = numeric[column] ? "number" : "";
        cell.title = cell.textContent;
      });
      if (at >= 0) {
        row.className = "goes";
        row.addEventListener("click", () => go(rows[index][at]));
      }
      return row;
    }));
    const more = shown.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    found.textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows${more}`;
  }

  async function go(where) {
    if (!tracks) return;
    await draw(tracks, name);
    const place = tracks.layout.meta.positions.indexOf(parseInt(where, 10));
    if (place < 0) return;
    const { minallowed, maxallowed } = tracks.layout.xaxis;
    const range = [Math.max(minallowed, place - AROUND - 0.5), Math.min(maxallowed, place + AROUND + 0.5)];
    const kept = (tracks.layout.shapes || []).filter((shape) => shape.name !== "found");
    const shape = { name: "found", type: "rect", xref: "x", yref: "paper", x0: place - 0.5, x1: place + 0.5, y0: 0, y1: 1,
      line: { color: "#000", width: 1.5 }, fillcolor: "rgba(0,0,0,0)" };
    await Plotly.relayout(tracks, { "xaxis.range": range, shapes: [...kept, shape] });
  }

  function clear() {
    const shapes = tracks && tracks.drawn && tracks.layout ? tracks.layout.shapes || [] : [];
    if (!shapes.some((shape) => shape.name === "found")) return;
    const { minallowed, maxallowed } = tracks.layout.xaxis;
    Plotly.relayout(tracks, { "xaxis.range": [minallowed, maxallowed], shapes: shapes.filter((shape) => shape.name !== "found") });
  }

  input.addEventListener("input", search);
  section.querySelector("button.csv").addEventListener("click", () => {
    const quoted = (value) => value === null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value;
    const lines = [columns, ...shown.map((index) => rows[index])].map((row) => row.map(quoted).join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
    link.download = `${name}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
  fill();
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
