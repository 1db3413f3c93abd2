"use strict";
// Shows what lies under the mouse, marks positions, and makes tables sort, search and download.

const SHOWN = 200;
// Pixels from the mouse within which a point is shown.
const NEAR = 12;
const read = (element) => JSON.parse(element.textContent);
// A position as text, without the apostrophe that keeps -4;2 from being a spreadsheet's formula.
const placeOf = (value) => String(value).replace(/^'/, "");

for (const section of document.querySelectorAll("section")) setUp(section);

function setUp(section) {
  const name = section.dataset.file, figure = section.querySelector(".figure"), tip = figure.querySelector(".tip");
  const spots = read(section.querySelector("script.spots"));
  figure.addEventListener("mousemove", (event) => {
    const { left, top, width, height } = figure.querySelector("svg").getBoundingClientRect();
    const text = under(spots, (event.clientX - left) / width, (event.clientY - top) / height, width, height);
    tip.hidden = !text;
    tip.textContent = text;
    tip.style.left = `${event.clientX - left + 14}px`;
    tip.style.top = `${event.clientY - top + 14}px`;
  });
  figure.addEventListener("mouseleave", () => { tip.hidden = true; });
  section.querySelector("button.svg").addEventListener("click", () =>
    download(new XMLSerializer().serializeToString(figure.querySelector("svg")), "image/svg+xml", `${name}.svg`));
  if (section.querySelector("table")) setUpTable(section, name, (place) => mark(figure, spots, place));
}

// The text of the cell or of the nearest point at a place of the figure.
function under(spots, x, y, width, height) {
  for (const { box: [left, top, wide, high], texts, points } of spots) {
    const across = (x - left) / wide, down = (y - top) / high;
    if (across < 0 || across >= 1 || down < 0 || down >= 1) continue;
    if (texts) {
      const row = texts[Math.floor(down * texts.length)];
      return row[Math.floor(across * row.length)] || "";
    }
    const distance = ([px, py]) => Math.hypot((px - x) * width, (py - y) * height);
    const nearest = points.reduce((best, one) => (!best || distance(one) < distance(best) ? one : best), null);
    return nearest && distance(nearest) <= NEAR ? nearest[2] : "";
  }
  return "";
}

// Frames the column of a position in the tracks; null removes the frame.
function mark(figure, spots, place) {
  const frame = figure.querySelector(".mark"), position = parseInt(placeOf(place), 10);
  const tracks = spots.filter(({ columns }) => columns && columns.includes(position));
  frame.hidden = !tracks.length;
  if (!tracks.length) return;
  const { box: [left, , wide], columns } = tracks[0];
  const top = Math.min(...tracks.map(({ box }) => box[1])), end = Math.max(...tracks.map(({ box }) => box[1] + box[3]));
  const share = (value) => `${100 * value}%`;
  frame.style.left = share(left + (wide * columns.indexOf(position)) / columns.length);
  frame.style.width = share(wide / columns.length);
  frame.style.top = share(top);
  frame.style.height = share(end - top);
}

function download(text, type, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

// Four decimals, or three digits of what these would show as zero.
function number(value) {
  if (Number.isInteger(value)) return value;
  return Math.abs(value) < 0.001 ? value.toPrecision(3) : value.toFixed(4);
}

function setUpTable(section, name, mark) {
  const { columns, rows, position } = read(section.querySelector("script.table"));
  const at = columns.indexOf(position);
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
      const begin = (row) => index === at ? parseInt(placeOf(rows[row][at]), 10) : 0;
      order.sort((a, b) => sorted.sign * (begin(a) - begin(b) || compare(rows[a][index], rows[b][index])));
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
      ? placeOf(rows[index][at]).split(";").some((part) => {
        // Deleted residues are a range, such as 2_4.
        const [first, last = first] = part.split("_").map(Number);
        return first <= place && place <= last;
      })
      : words.every((word) => texts[index].includes(word)));
    fill();
    const places = new Set(shown.map((index) => rows[index][at]));
    mark(words.length && places.size === 1 ? [...places][0] : null);
  }

  function fill() {
    body.replaceChildren(...shown.slice(0, SHOWN).map((index) => {
      const row = document.createElement("tr");
      rows[index].forEach((value, column) => {
        const cell = row.appendChild(document.createElement("td"));
        cell.textContent = typeof value === "number" ? number(value) : value;
        cell.className = numeric[column] ? "number" : "";
        cell.title = cell.textContent;
      });
      if (at >= 0) {
        row.className = "goes";
        row.addEventListener("click", () => mark(rows[index][at]));
      }
      return row;
    }));
    const more = shown.length > SHOWN ? `, the first ${SHOWN} shown` : "";
    found.textContent = `${shown.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows${more}`;
  }

  input.addEventListener("input", search);
  section.querySelector("button.csv").addEventListener("click", () => {
    const quoted = (value) => value === null ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value;
    const lines = [columns, ...shown.map((index) => rows[index])].map((row) => row.map(quoted).join(","));
    download(lines.join("\n") + "\n", "text/csv", `${name}.csv`);
  });
  fill();
}

function compare(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
