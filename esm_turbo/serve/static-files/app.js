// The page: proteins become variant maps, targets and peptides rankings; embeddings and designs are tables.

import { post, stream, withToken } from "/static/api.js";
import { PEPTIDES, PROTEIN } from "/static/examples.js";
import { HeatMap, colour } from "/static/heatmap.js";

const $ = (id) => document.getElementById(id);
// The number in a field; one that was emptied has again what it had at first.
function number(id) {
  const field = $(id);
  field.value ||= field.defaultValue;
  return Number(field.value);
}

const map = new HeatMap($("map"), $("tip"));
const results = {};
let model = "";
let limits = { residues: 1022 };
let readsHomologs = false;
let comparisonChosen = false;
// Of the only sequence of a text without headers.
const UNNAMED = "protein";
// What ranks peptides, by the figure.
const RANKED_BY = {
  mean_log_probability: "pseudo-perplexity",
  specificity: "specificity",
  specificity_z: "specificity, in standard deviations of the other contexts",
};

// Names and residues of the records of FASTA; of other text, which has no headers, of one.
function records(text) {
  const found = [];
  for (const line of text.split("\n")) {
    if (line.startsWith(">")) found.push({ name: line.slice(1).trim().split(/\s/)[0] || `#${found.length + 1}`, sequence: "" });
    else if (line.trim() && !found.length) found.push({ name: UNNAMED, sequence: line });
    else if (line.trim()) found.at(-1).sequence += line;
  }
  // As the library does, a stop at the end is left out, and letters beyond ASCII are not made others.
  for (const one of found) one.sequence = one.sequence.replace(/\s+/g, "").replace(/[a-z]+/g, (own) => own.toUpperCase()).replace(/\*$/, "");
  if (!found.some((one) => one.sequence)) throw new Error("Paste a sequence first.");
  const empty = found.find((one) => !one.sequence);
  if (empty) throw new Error(`${empty.name} has no residues.`);
  return found;
}

// The context of the homologs of a tab: its id, or null for none. Gaps of an alignment are left out, and so is the
// protein itself, whose residues would be read where they are masked, and HH-suite's annotations; insertions are kept.
// X in a protein, which a design replaces, stands for any residue.
async function homologs(name, proteins, signal) {
  const text = $(`homologs-${name}`).value;
  if (!text.trim()) return null;
  const family = records(text).filter((one) => !/^(ss|sa|aa)_(pred|conf|dssp)$/.test(one.name));
  const read = family.map((one) => ({ ...one, sequence: one.sequence.replace(/[-.~]/g, "") }));
  const own = proteins.map(({ sequence }) =>
    new RegExp(`^${sequence.replaceAll("<MASK>", "X").replace(/[^A-Z]/g, "\\$&").replaceAll("X", ".")}$`));
  const others = read.filter((one) => !own.some((protein) => protein.test(one.sequence)));
  if (!others.length) throw new Error("The homologs hold the protein alone.");
  try {
    return (await post("/v1/contexts", { sequence: others.map((one) => one.sequence) }, signal)).id;
  } catch (error) {
    error.message = error.message.replace(/^sequence: (?:sequence, )?/, "homologs: ");
    error.message = error.message.replace(/homolog (\d+)/, (_, number) => others[number - 1].name);
    throw error;
  }
}

// A text of a table that a program of spreadsheets must not run, and whose commas do not divide it.
function cell(value) {
  const text = typeof value === "string" && /^[=+\-@]/.test(value) ? `'${value}` : String(value ?? "");
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function csv(columns, rows) {
  const lines = [columns, ...rows].map((row) => row.map(cell).join(","));
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
  const preset = run.preset ? `, preset ${run.preset}` : "";
  return `${run.model} (weights ${run.fingerprint}), arm ${run.arm}${preset}, esm_turbo ${run.version}, ${run.device}`;
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
    $(`result-${name}`).querySelector(".run").textContent = `Computed by ${describe(result.run ?? result[0].run)}.`;
  } catch (error) {
    $(`error-${name}`).textContent = error.name === "AbortError" ? "Cancelled." : error.message;
  } finally {
    $(`run-${name}`).disabled = false;
    bar.hidden = cancel.hidden = true;
  }
}

// Asks the same of the contexts of several proteins, one after the other; answers carry their names. A model that reads
// homologs is asked for each protein after the same ones.
async function each(proteins, endpoint, body, signal, report) {
  const answers = [];
  const context = readsHomologs ? await homologs(endpoint, proteins, signal) : null;
  for (const [index, { name, sequence }] of proteins.entries()) {
    try {
      const done = (share) => report((index + share) / proteins.length);
      const path = readsHomologs ? `/v1/${endpoint}` : `/v1/contexts/${(await post("/v1/contexts", { sequence }, signal)).id}/${endpoint}`;
      const given = readsHomologs ? { ...body, sequence, context } : body;
      answers.push({ name, ...(await stream(path, given, signal, done)) });
    } catch (error) {
      if (proteins.length > 1 && error.name !== "AbortError") error.message = `${name}: ${error.message}`;
      throw error;
    }
  }
  return answers;
}

// Lets one of several answers be chosen, and shows the first.
function choose(name, answers, show) {
  const which = $(`which-${name}`);
  which.replaceChildren(...answers.map((one, index) => new Option(one.name, index)));
  $(`choice-${name}`).hidden = answers.length < 2;
  which.onchange = () => show(answers[which.value]);
  $(`result-${name}`).hidden = false;
  show(answers[0]);
}

function showVariants(answer) {
  const first = answer.first_position;
  const scores = [...answer.wild_type].map(() => ({}));
  for (const { variant, score } of answer.variants) {
    scores[Number(variant.slice(1, -1)) - first][variant.at(-1)] = score;
  }
  map.draw(answer.wild_type, first, scores);
  $("title-variants").textContent = `${answer.variants.length.toLocaleString("en")} substitutions of ${answer.wild_type.length} residues`;
  const best = [...answer.variants].sort((a, b) => b.score - a.score);
  const limit = map.limit;
  const boxes = [-1, -0.5, 0, 0.5, 1].map((share) => {
    const item = document.createElement("span");
    item.className = "muted";
    const box = document.createElement("canvas");
    box.width = box.height = 12;
    box.style.display = "inline-block";
    const pen = box.getContext("2d");
    pen.fillStyle = colour(share * limit, limit);
    pen.fillRect(0, 0, 12, 12);
    // The colours end where few scores are beyond.
    item.append(box, ` ${{ "-1": "≤ ", 1: "≥ " }[share] ?? ""}${(share * limit).toFixed(1)}`);
    return item;
  });
  const range = document.createElement("span");
  range.className = "muted";
  range.textContent = `scores from ${fixed(best.at(-1).score, 2)} to ${fixed(best[0].score, 2)}`;
  $("scale").replaceChildren(...boxes, range);
  const rows = best.slice(0, 20).map((one) => [one.variant, one.score.toFixed(3)]);
  fillTable($("table-variants"), [["variant", "sequence"], ["score (nats)", "number"]], rows);
}

// The figure that ranks candidates, as in the library: specificity is in standard deviations where all have it in them.
function rankingFigure(candidates, sort) {
  const compared = candidates.filter((one) => one.specificity != null);
  if (sort !== "specificity" || !compared.length) return "mean_log_probability";
  return compared.every((one) => one.specificity_z != null) ? "specificity_z" : "specificity";
}

// Candidates, best first by a figure; those without it come last.
function bestFirst(candidates, by) {
  const value = (one) => one[by] ?? -Infinity;
  return [...candidates].sort((a, b) => (value(a) === value(b) ? a.rank - b.rank : value(b) - value(a)));
}

// Candidates of an answer, best first by what the page sorts by; those scored again get their rank among each other.
function ranked({ candidates }) {
  const by = rankingFigure(candidates, $("sort").value);
  bestFirst(candidates.flatMap((one) => one.again ?? []), by).forEach((one, index) => { one.among = index + 1; });
  return bestFirst(candidates, by);
}

function fixed(value, digits) {
  return value == null ? "" : value.toFixed(digits);
}

function showRanking(answer) {
  const rows = ranked(answer);
  const by = rankingFigure(rows, $("sort").value);
  const specific = rows.some((one) => one.specificity != null);
  for (const one of document.querySelectorAll("#result-ranking .specific")) one.hidden = !specific;
  const inSpreads = rows.some((one) => one.specificity_z != null);
  const again = rows.some((one) => one.again);
  const columns = [
    ["rank", "number", (_, index) => index + 1],
    ["peptide", "sequence", (one) => one.candidate],
    ["pseudo-perplexity", "number", (one) => fixed(one.pseudo_perplexity, 3)],
    ["mean log p (nats per residue)", "number", (one) => fixed(one.mean_log_probability, 3)],
  ];
  if (specific) columns.push(["specificity (nats per residue)", "number", (one) => fixed(one.specificity, 3)]);
  if (inSpreads) columns.push(["specificity (s.d.)", "number", (one) => fixed(one.specificity_z, 2)]);
  if (again) {
    columns.push(["pseudo-perplexity, target recomputed", "number", (one) => fixed(one.again?.pseudo_perplexity, 3)]);
    const [unit, digits] = { specificity: ["nats per residue", 3], specificity_z: ["s.d.", 2] }[by] ?? [];
    if (unit) columns.push([`specificity (${unit}), target recomputed`, "number", (one) => fixed(one.again?.[by], digits)]);
    columns.push([`${unit ? "specificity" : "likelihood"} rank among these`, "number", (one) => one.again?.among ?? ""]);
  }
  fillTable($("table-ranking"), columns, rows.map((one, index) => columns.map(([, , value]) => value(one, index))));
  $("recomputed").hidden = !again || !specific;
  $("title-ranking").textContent = `${rows.length.toLocaleString("en")} peptides, ranked by ${RANKED_BY[by]}`;
}

// Gives a candidate its specificity against the figures of a background, as the library defines it.
function compare(one, background) {
  one.background = background;
  one.specificity = one.mean_log_probability - background.mean;
  one.specificity_z = background.contexts >= 5 && background.spread >= 1e-6 ? one.specificity / background.spread : null;
}

// Compares every peptide with the same peptide on all other targets; those of the same residues count as one.
function compareTargets(targets, answers) {
  const first = targets.map((one) => targets.findIndex((other) => other.sequence === one.sequence));
  answers.forEach((answer, own) => answer.candidates.forEach((one, index) => {
    const elsewhere = answers.filter((_, other) => first[other] === other && first[own] !== other);
    const others = elsewhere.map((other) => other.candidates[index].mean_log_probability);
    const mean = others.reduce((sum, value) => sum + value, 0) / others.length;
    const squares = others.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    const spread = Math.sqrt(squares / Math.max(1, others.length - 1));
    compare(one, { mean, spread, contexts: others.length });
  }));
}

// Compares several targets with each other, unless something else was chosen.
function suggestComparison() {
  const background = $("background");
  const several = ($("target").value.match(/^>/gm) ?? []).length > 1;
  if (!comparisonChosen && several) background.value = "targets";
  else if (!comparisonChosen && background.value === "targets") background.value = "none";
}

function peptides() {
  const text = $("peptides").value;
  if (text.includes(">")) return records(text).map((one) => one.sequence);
  const lines = text.split("\n").map((line) => line.trim()).filter(Boolean);
  if (!lines.length) throw new Error("Paste peptides first, one per line.");
  return lines;
}

$("run-variants").onclick = () => task("variants", async (signal, report) => {
  const first = number("first");
  if (!Number.isSafeInteger(first)) throw new Error("The first position must be a whole number.");
  const answers = await each(records($("protein").value), "variants", { first_position: first }, signal, report);
  choose("variants", answers, showVariants);
  return answers;
});

$("run-ranking").onclick = () => task("ranking", async (signal, report) => {
  const candidates = peptides();
  const targets = records($("target").value);
  const background = $("background").value;
  const different = new Set(targets.map((one) => one.sequence)).size;
  if (background === "targets" && different < 2) throw new Error("Paste several different targets as FASTA to compare them.");
  const body = { candidates, background: background === "targets" ? "none" : background };
  const answers = await each(targets, "score", body, signal, report);
  if (background === "targets") compareTargets(targets, answers);
  if (background !== "none") $("sort").value = "specificity";
  choose("ranking", answers, showRanking);
  return answers;
});

$("target").oninput = suggestComparison;
$("background").onchange = () => { comparisonChosen = true; };
$("sort").onchange = () => showRanking(results.ranking[$("which-ranking").value]);
$("again").onclick = () => task("ranking", async (signal, report) => {
  const answers = results.ranking;
  const chosen = $("which-ranking").value;
  const count = number("best");
  if (!Number.isSafeInteger(count) || count < 1) throw new Error("The number of peptides to score again must be a whole number from 1.");
  const best = ranked(answers[chosen]).slice(0, count);
  for (const one of answers[chosen].candidates) delete one.again;
  const body = { candidates: best.map((one) => one.candidate), refresh: limits.residues };
  const again = await stream(`/v1/contexts/${answers[chosen].context}/score`, body, signal, report);
  again.candidates.forEach((one, index) => {
    if (best[index].background) compare(one, best[index].background);
    best[index].again = one;
  });
  showRanking(answers[chosen]);
  return answers;
});

$("run-embedding").onclick = () => task("embedding", async (signal) => {
  const proteins = records($("sequences").value);
  const context = await homologs("embedding", proteins, signal);
  const answer = await post("/v1/embeddings", { input: proteins.map((one) => one.sequence), model, context }, signal);
  answer.names = proteins.map((one) => one.name);
  const size = answer.data[0].embedding.length;
  const rows = answer.data.map(({ embedding }, index) => [
    answer.names[index], proteins[index].sequence.length, embedding.slice(0, 4).map((value) => value.toFixed(3)).join(", ") + ", …",
  ]);
  fillTable($("table-embedding"), [["protein", ""], ["residues", "number"], ["first values", "sequence"]], rows);
  $("title-embedding").textContent = `${rows.length.toLocaleString("en")} embeddings of ${size} values`;
  return answer;
});

// Peptides of a template after a target, each once, drawn as PepMLM does and ranked by specificity, or by likelihood.
async function peptidesOf(template, { name, sequence }, options, signal, report) {
  const drawn = await post("/v1/generate", { ...options, sequence, template, top_k: 3, per_step: limits.candidate_residues }, signal);
  const candidates = [...new Set(drawn.sequences.map((one) => one.sequence.slice(sequence.length)))];
  const background = $("design-background").value;
  const [answer] = await each([{ name, sequence }], "score", { candidates, background }, signal, report);
  const by = rankingFigure(answer.candidates, "specificity");
  const rows = bestFirst(answer.candidates, by);
  const columns = [["rank", "number"], ["peptide", "sequence"], ["pseudo-perplexity", "number"]];
  if (background !== "none") columns.push(["specificity (nats per residue)", "number"]);
  if (by === "specificity_z") columns.push(["specificity (s.d.)", "number"]);
  fillTable($("table-design"), columns, rows.map((one, index) => {
    const figures = [fixed(one.specificity, 3), fixed(one.specificity_z, 2)].slice(0, columns.length - 3);
    return [index + 1, one.candidate, fixed(one.pseudo_perplexity, 3), ...figures];
  }));
  $("ranked-design").textContent = `Ranked by ${RANKED_BY[by]}. Likely is not binding.`;
  const target = `${name === UNNAMED ? "the target" : name} (${sequence.length.toLocaleString("en")} residues)`;
  $("title-design").textContent = `${rows.length.toLocaleString("en")} different peptides for ${target}, of ${drawn.sequences.length} drawn`;
  const entries = rows.map((one, index) => `>${name}_${index + 1} ${by}=${one[by].toFixed(4)} pseudo_perplexity=${one.pseudo_perplexity.toFixed(4)}\n${one.candidate}\n`);
  return { run: answer.run, entries };
}

$("run-design").onclick = () => task("design", async (signal, report) => {
  const [{ name, sequence }, ...more] = records($("scaffold").value);
  if (more.length) throw new Error("Design one protein at a time.");
  const append = number("append");
  const template = $("template").value.trim(), seed = number("seed");
  if (!Number.isSafeInteger(seed)) throw new Error("The seed must be a whole number of at most 15 digits.");
  const body = { num_return_sequences: number("samples"), temperature: number("temperature"), seed };
  $("ranked-design").hidden = !template;
  if (template && append) throw new Error("Give a template, or residues to append, not both.");
  if (template) return peptidesOf(template, { name, sequence }, body, signal, report);
  if (append) Object.assign(body, { sequence, max_new_tokens: append });
  else Object.assign(body, { sequence: sequence.replaceAll("X", "<mask>"), context: await homologs("design", [{ sequence }], signal) });
  const answer = await post("/v1/generate", body, signal);
  const columns = [["new residues", "sequence"], ["mean log p (nats per residue)", "number"], ["sequence", "sequence"]];
  fillTable($("table-design"), columns, answer.sequences.map((one) => [one.new_residues, one.mean_log_prob.toFixed(3), one.sequence]));
  $("title-design").textContent = `${answer.sequences.length} design${answer.sequences.length === 1 ? "" : "s"}`;
  const entries = answer.sequences.map((one, index) => `>${name}_${index + 1} new=${one.new_residues} mean_log_prob=${one.mean_log_prob.toFixed(4)}\n${one.sequence}\n`);
  return { run: answer.run, entries };
});

$("example-variants").onclick = () => { $("protein").value = PROTEIN; };
$("example-ranking").onclick = () => {
  $("target").value = PROTEIN;
  $("peptides").value = PEPTIDES.join("\n");
  suggestComparison();
};
$("example-embedding").onclick = () => { $("sequences").value = `>example\n${PROTEIN}\n>half\n${PROTEIN.slice(0, 40)}`; };
$("example-design").onclick = () => { $("scaffold").value = `${PROTEIN.slice(0, 30)}XXXXXX${PROTEIN.slice(36)}`; };
$("csv-variants").onclick = () => {
  const several = results.variants.length > 1;
  const rows = results.variants.flatMap(({ name, variants }) => variants.map((one) => [...(several ? [name] : []), one.variant, one.score]));
  download("variants.csv", csv([...(several ? ["protein"] : []), "mutant", "score"], rows));
};
$("png-variants").onclick = () => $("map").toBlob((blob) => download("variants.png", blob));
$("csv-ranking").onclick = () => {
  const names = ["candidate", "pseudo_perplexity", "pseudo_log_likelihood", "mean_log_probability"];
  if (results.ranking[0].candidates.some((one) => one.specificity != null)) names.push("specificity", "specificity_z");
  // Of candidates that were scored again with the target recomputed.
  const again = results.ranking.some(({ candidates }) => candidates.some((one) => one.again));
  const figures = again ? ["pseudo_perplexity", ...names.filter((name) => name.startsWith("specificity")), "among"] : [];
  const rows = results.ranking.flatMap((answer) => ranked(answer).map((one, index) => [
    answer.name, index + 1, ...names.map((name) => one[name]), ...figures.map((name) => one.again?.[name]),
  ]));
  const columns = figures.map((name) => `recomputed_${name === "among" ? "rank" : name}`);
  download("ranking.csv", csv(["target", "rank", ...names, ...columns], rows));
};
$("csv-embedding").onclick = () => {
  const { names, data } = results.embedding;
  const columns = ["protein", ...data[0].embedding.map((_, index) => `mean_${index}`)];
  download("embeddings.csv", csv(columns, data.map(({ embedding }, index) => [names[index], ...embedding])));
};
$("fasta-design").onclick = () => download("designs.fasta", new Blob(results.design.entries, { type: "text/plain" }));

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
  .then((about) => {
    ({ model, limits } = about);
    readsHomologs = about.homologs !== null;
    for (const one of document.querySelectorAll(".homologs")) one.hidden = !readsHomologs;
    for (const one of document.querySelectorAll(".frozen")) one.hidden = readsHomologs;
    $("service").textContent = `model ${model}, version ${about.version}; proteins of up to ${limits.residues.toLocaleString("en")} residues`;
  })
  .catch(() => { $("service").textContent = "the service cannot be reached"; });

