// The page: a protein becomes a variant map, a target and peptides a ranking.

import { post, stream, withToken } from "/static/api.js";
import { PEPTIDES, PROTEIN } from "/static/examples.js";
import { HeatMap, colour } from "/static/heatmap.js";

const $ = (id) => document.getElementById(id);
const map = new HeatMap($("map"), $("tip"));
const results = {};

// Residues of text that may be FASTA.
function residues(text) {
  return text.split("\n").filter((line) => !line.startsWith(">")).join("").replace(/\s+/g, "").toUpperCase();
}

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv(columns, rows) {
  const lines = [columns, ...rows].map((row) => row.join(","));
  return new Blob([lines.join("\n") + "\n"], { type: "text/csv" });
}

function fillTable(table, columns, rows) {
  table.replaceChildren();
  const head = table.createTHead().insertRow();
  for (const [title, kind] of columns) {
    const cell = document.createElement("th");
    cell.textContent = title;
    if (kind) cell.className = kind;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const values of rows) {
    const row = body.insertRow();
    values.forEach((value, index) => {
      const cell = row.insertCell();
      cell.className = columns[index][1] ?? "";
      if (value instanceof Node) cell.append(value);
      else cell.textContent = value;
    });
  }
}

function describe(run) {
  return `${run.model} (weights ${run.fingerprint}), arm ${run.arm}, preset ${run.preset}, esm_turbo ${run.version}, ${run.device}`;
}

// Runs one task of the page with its buttons, progress and errors. `work` gets a signal and a reporter of progress.
async function task(name, work) {
  const abort = new AbortController();
  const bar = $(`progress-${name}`);
  const cancel = $(`cancel-${name}`);
  $(`error-${name}`).textContent = "";
  $(`result-${name}`).hidden = true;
  $(`run-${name}`).disabled = true;
  bar.hidden = cancel.hidden = false;
  bar.value = 0;
  cancel.onclick = () => abort.abort();
  try {
    const result = await work(abort.signal, (share) => { bar.value = share; });
    results[name] = result;
    $(`result-${name}`).hidden = false;
    $(`result-${name}`).querySelector(".run").textContent = `Computed by ${describe(result.run)}.`;
  } catch (error) {
    $(`error-${name}`).textContent = error.name === "AbortError" ? "Cancelled." : error.message;
  } finally {
    $(`run-${name}`).disabled = false;
    bar.hidden = cancel.hidden = true;
  }
}

async function storedContext(text, signal) {
  const sequence = residues(text);
  if (!sequence) throw new Error("Paste a sequence first.");
  return (await post("/v1/contexts", { sequence }, signal)).id;
}

function showVariants(answer) {
  const first = answer.first_position;
  const scores = [...answer.wild_type].map(() => ({}));
  for (const { variant, score } of answer.variants) {
    scores[Number(variant.slice(1, -1)) - first][variant.at(-1)] = score;
  }
  $("result-variants").hidden = false;
  map.draw(answer.wild_type, first, scores);
  $("title-variants").textContent = `${answer.variants.length.toLocaleString("en")} substitutions of ${answer.wild_type.length} residues`;
  const limit = map.limit;
  $("scale").replaceChildren(...[-1, -0.5, 0, 0.5, 1].map((share) => {
    const item = document.createElement("span");
    item.className = "muted";
    const box = document.createElement("canvas");
    box.width = box.height = 12;
    box.style.display = "inline-block";
    const pen = box.getContext("2d");
    pen.fillStyle = colour(share * limit, limit);
    pen.fillRect(0, 0, 12, 12);
    item.append(box, ` ${(share * limit).toFixed(1)}`);
    return item;
  }));
  const best = [...answer.variants].sort((a, b) => b.score - a.score).slice(0, 20);
  fillTable($("table-variants"), [["variant", "sequence"], ["score", "number"]], best.map((one) => [one.variant, one.score.toFixed(3)]));
}

function showRanking(answer) {
  const rows = [...answer.candidates].sort((a, b) => a.rank - b.rank);
  const largest = Math.max(...rows.map((one) => one.mean_log_probability - rows.at(-1).mean_log_probability)) || 1;
  const least = rows.at(-1).mean_log_probability;
  const columns = [["rank", "number"], ["peptide", "sequence"], ["pseudo-perplexity", "number"], ["pseudo-log-likelihood", "number"], ["", ""]];
  fillTable($("table-ranking"), columns, rows.map((one) => {
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${Math.round(4 + 96 * (one.mean_log_probability - least) / largest)}px`;
    return [one.rank, one.candidate, one.pseudo_perplexity.toFixed(3), one.pseudo_log_likelihood.toFixed(2), bar];
  }));
  $("title-ranking").textContent = `${rows.length.toLocaleString("en")} peptides, most likely first`;
}

$("run-variants").onclick = () => task("variants", async (signal, report) => {
  const first = Number($("first").value);
  if (!Number.isSafeInteger(first)) throw new Error("The first position must be a whole number.");
  const id = await storedContext($("protein").value, signal);
  const answer = await stream(`/v1/contexts/${id}/variants`, { first_position: first }, signal, report);
  showVariants(answer);
  return answer;
});

$("run-ranking").onclick = () => task("ranking", async (signal, report) => {
  const candidates = $("peptides").value.split("\n").map((line) => line.trim()).filter((line) => line && !line.startsWith(">"));
  if (!candidates.length) throw new Error("Paste peptides first, one per line.");
  const id = await storedContext($("target").value, signal);
  const answer = await stream(`/v1/contexts/${id}/score`, { candidates }, signal, report);
  showRanking(answer);
  return answer;
});

$("example-variants").onclick = () => { $("protein").value = PROTEIN; };
$("example-ranking").onclick = () => {
  $("target").value = PROTEIN;
  $("peptides").value = PEPTIDES.join("\n");
};
$("csv-variants").onclick = () => {
  const rows = results.variants.variants.map((one) => [one.variant, one.score]);
  download("variants.csv", csv(["mutant", "score"], rows));
};
$("png-variants").onclick = () => $("map").toBlob((blob) => download("variants.png", blob));
$("csv-ranking").onclick = () => {
  const names = ["rank", "candidate", "pseudo_perplexity", "pseudo_log_likelihood", "mean_log_probability"];
  const rows = [...results.ranking.candidates].sort((a, b) => a.rank - b.rank);
  download("ranking.csv", csv(names, rows.map((one) => names.map((name) => one[name]))));
};

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.onclick = () => {
    for (const one of tabs) {
      one.setAttribute("aria-selected", String(one === tab));
      $(one.getAttribute("aria-controls")).hidden = one !== tab;
    }
  };
}

fetch("/healthz", { headers: withToken() })
  .then((answer) => answer.json())
  .then(({ model, version, limits }) => {
    $("service").textContent = `model ${model}, version ${version}; proteins of up to ${limits.residues.toLocaleString("en")} residues`;
  })
  .catch(() => { $("service").textContent = "the service cannot be reached"; });

