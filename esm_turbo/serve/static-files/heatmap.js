// The heat map of all single substitutions: positions across, amino acids down by chemistry, colours as in `--plot`.

export const ORDER = "RKHDEQNSTYWFAILMVGPC";
const CELL = 12;
const LEFT = 22;
const TOP = 34;
const STEP = 10;

// A diverging scale, red over white to blue; the ends are those of ColorBrewer's RdBu.
export function colour(score, limit) {
  const x = Math.max(-1, Math.min(1, score / limit));
  const [end, t] = x < 0 ? [[178, 24, 43], -x] : [[33, 102, 172], x];
  const [r, g, b] = end.map((c) => Math.round(247 + (c - 247) * Math.sqrt(t)));
  return `rgb(${r},${g},${b})`;
}

export class HeatMap {
  constructor(canvas, tip) {
    this.canvas = canvas;
    this.tip = tip;
    this.at = null;
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.leave());
  }

  // `scores[position][residue]`, positions from 0; the wild type's own score is 0.
  draw(wildType, first, scores) {
    this.wildType = wildType;
    this.first = first;
    this.scores = scores;
    const all = scores.flatMap((row) => Object.values(row)).map(Math.abs).sort((a, b) => a - b);
    this.limit = all[Math.floor(0.98 * (all.length - 1))] || 1;
    const width = LEFT + CELL * wildType.length + 8;
    const height = TOP + CELL * ORDER.length + 8;
    const ratio = Math.min(window.devicePixelRatio || 1, 16000 / width);
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, width, height);
    pen.font = "11px ui-monospace, monospace";
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    pen.fillStyle = "#333";
    [...ORDER].forEach((residue, row) => pen.fillText(residue, LEFT / 2, TOP + CELL * (row + 0.5)));
    [...wildType].forEach((own, column) => {
      const position = first + column;
      pen.fillStyle = "#333";
      if (position % STEP === 0) pen.fillText(String(position), LEFT + CELL * (column + 0.5), TOP / 4);
      pen.fillText(own, LEFT + CELL * (column + 0.5), TOP - CELL / 2);
      [...ORDER].forEach((residue, row) => {
        // A break between chains has no scores.
        if (residue !== own && scores[column][residue] == null) return;
        const x = LEFT + CELL * column;
        const y = TOP + CELL * row;
        pen.fillStyle = residue === own ? "#f7f7f7" : colour(scores[column][residue], this.limit);
        pen.fillRect(x, y, CELL - 0.5, CELL - 0.5);
        if (residue === own) {
          pen.fillStyle = "#222";
          pen.beginPath();
          pen.arc(x + CELL / 2, y + CELL / 2, 2.2, 0, 2 * Math.PI);
          pen.fill();
        }
      });
    });
  }

  text(column, row) {
    const own = this.wildType[column];
    const residue = ORDER[row];
    const place = this.first + column;
    if (residue === own) return `${own}${place}\nwild type`;
    const score = this.scores[column][residue];
    if (score == null) return `${own}${place}\nno score`;
    return `${own}${place}${residue}\n${score > 0 ? "+" : ""}${score.toFixed(3)}`;
  }

  show(column, row, x, y) {
    this.at = [column, row];
    this.tip.textContent = this.text(column, row);
    this.tip.hidden = false;
    this.tip.style.left = `${Math.min(x + 14, window.innerWidth - 110)}px`;
    this.tip.style.top = `${Math.min(y + 14, window.innerHeight - 50)}px`;
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT) / CELL);
    const row = Math.floor((event.clientY - box.top - TOP) / CELL);
    const inside = column >= 0 && row >= 0 && column < this.wildType?.length && row < ORDER.length;
    if (inside) this.show(column, row, event.clientX, event.clientY);
    else this.leave();
  }

  key(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step || !this.wildType) return;
    event.preventDefault();
    const [column, row] = this.at ?? [0, 0];
    const next = [
      Math.max(0, Math.min(this.wildType.length - 1, column + step[0])),
      Math.max(0, Math.min(ORDER.length - 1, row + step[1])),
    ];
    const box = this.canvas.getBoundingClientRect();
    this.show(...next, box.left + LEFT + CELL * next[0], box.top + TOP + CELL * next[1]);
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
  }
}
