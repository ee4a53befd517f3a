"use strict";
// Every number of the attention is in the recording; this program only chooses which to show.
const data = JSON.parse(document.getElementById("recording").textContent);
const at = (id) => document.getElementById(id);
const state = { mask: data.first, pass: "forward", step: 0, row: 0, timer: 0 };
const THEMES = ["system", "light", "dark"];
const KINDS = ["skipped", "partial", "full"];

// --- the recording ------------------------------------------------------------------------------

const maskOf = () => data.masks.find((one) => one.name === state.mask);
const passOf = () => maskOf().passes[state.pass];
const stepNow = () => (state.step ? passOf().steps[state.step - 1] : null);
const keysResident = () => state.pass === "dkdv";
const residentBlock = () => (keysResident() ? data.blockK : data.blockQ);
const passingBlock = () => (keysResident() ? data.blockQ : data.blockK);
const residentCount = () => (keysResident() ? data.keys : data.queries);
const passingCount = () => (keysResident() ? data.queries : data.keys);
const residentOf = (step) => (keysResident() ? step.j : step.i);
const passingOf = (step) => (keysResident() ? step.i : step.j);
const tileOfRow = () => Math.floor(state.row / residentBlock());
const rowInTile = () => state.row - tileOfRow() * residentBlock();

function range(tile, block, count) {
  return [tile * block, Math.min(count, (tile + 1) * block)];
}

// The steps so far of one resident tile, without its end.
function passedTiles(tile) {
  const steps = passOf().steps.slice(0, state.step);
  return steps.filter((one) => one.kind === "tile" && residentOf(one) === tile);
}

// --- numbers as text ----------------------------------------------------------------------------

function show(x) {
  if (x === null) return "−∞";
  const text = Math.abs(x).toFixed(data.digits);
  return x < 0 ? `−${text}` : text;
}

const number = (x) => `<span class="number">${show(x)}</span>`;
const vector = (xs) => `<span class="vector">(${xs.map(number).join(", ")})</span>`;
const strong = (html) => `<b>${html}</b>`;
const formula = (html) => `<p class="formula">${html}</p>`;

// --- the formulas of a step ---------------------------------------------------------------------

function softmaxFormulas(step, r, before) {
  const m = before ? before.m[r] : null;
  const l = before ? before.l[r] : 0;
  const O = before ? before.O[r] : step.O[r].map(() => 0);
  const lines = [
    `<i>m′</i> = max(<i>m</i>, max <i>S</i>) = max(${number(m)}, ${number(step.peak[r])}) = ${strong(number(step.m[r]))}`,
  ];
  if (step.m[r] === null) {
    lines.push("This row has seen no key so far: <i>l</i> and <i>O</i> stay 0.");
    return lines;
  }
  lines.push(
    `<i>α</i> = exp(<i>m</i> − <i>m′</i>) = exp(${number(m)} − ${bracketed(step.m[r])}) = ${number(step.alpha[r])}`,
    `<i>P</i> = exp(<i>S</i> − <i>m′</i>) = ${vector(step.P[r])}`,
    `<i>l′</i> = <i>α l</i> + Σ <i>P</i> = ${number(step.alpha[r])} · ${number(l)} + ${number(step.added[r])} = ${strong(number(step.l[r]))}`,
    `<i>O′</i> = <i>α O</i> + <i>P V</i> = ${number(step.alpha[r])} · ${vector(O)} + ${vector(step.part[r])} = ${strong(vector(step.O[r]))}`,
  );
  return lines;
}

const bracketed = (x) => (x < 0 ? `(${number(x)})` : number(x));

function forwardEnd(step, r, before) {
  if (step.lse[r] === null) {
    return [
      `This row sees no key: <i>O</i> = ${strong(vector(step.out[r]))}, <i>LSE</i> = ${strong(number(null))}.`,
    ];
  }
  return [
    `<i>O</i> / <i>l</i> = ${vector(before.O[r])} / ${number(before.l[r])} = ${strong(vector(step.out[r]))}`,
    `<i>LSE</i> = <i>m</i> + log <i>l</i> = ${number(before.m[r])} + log ${number(before.l[r])} = ${strong(number(step.lse[r]))}`,
  ];
}

// Row r of a tile [queries, keys]; where keys are resident, its column r.
const line = (tile, r) => (keysResident() ? tile.map((row) => row[r]) : tile[r]);

function gradientFormulas(step, r, before) {
  const dense = maskOf().dense;
  const zero = step.sum[r].map(() => 0);
  const i = state.row;
  const lines = [
    `<i>P</i> = exp(<i>S</i> − <i>LSE</i>) = ${vector(line(step.P, r))}` +
      (keysResident() || dense.lse[i] === null ? "" : `, <i>LSE</i> = ${number(dense.lse[i])}`),
    `<i>dP</i> = <i>dO V</i>ᵀ = ${vector(line(step.dP, r))}`,
    `<i>dS</i> = <i>P</i> (<i>dP</i> − <i>Δ</i>) = ${vector(line(step.dS, r))}` +
      (keysResident() ? "" : `, <i>Δ</i> = ${number(passOf().steps[0].delta[i])}`),
  ];
  let name = "dS";
  if (data.softcap > 0) {
    name = "dX";
    lines.push(`<i>dX</i> = <i>dS</i> (1 − tanh²) = ${vector(line(step.dX, r))}`);
  }
  if (keysResident()) {
    const dv = before ? before.dv[r] : zero;
    lines.push(
      `<i>dV′</i> = <i>dV</i> + <i>P</i>ᵀ <i>dO</i> = ${vector(dv)} + ${vector(step.part_v[r])} = ${strong(vector(step.dv[r]))}`,
    );
  }
  const sum = before ? before.sum[r] : zero;
  const product = keysResident() ? `<i>${name}</i>ᵀ <i>Q</i>` : `<i>${name} K</i>`;
  lines.push(
    `<i>Σ′</i> = <i>Σ</i> + ${product} = ${vector(sum)} + ${vector(step.part[r])} = ${strong(vector(step.sum[r]))}`,
  );
  return lines;
}

function gradientEnd(step, r, before) {
  const found = keysResident() ? step.dk[r] : step.dq[r];
  const name = keysResident() ? "dK" : "dQ";
  const sum = before ? before.sum[r] : found.map(() => 0);
  const lines = [
    `<i>${name}</i> = scale · <i>Σ</i> = ${number(data.scale)} · ${vector(sum)} = ${strong(vector(found))}`,
  ];
  if (keysResident()) lines.push(`<i>dV</i> = ${strong(vector(step.dv[r]))}`);
  return lines;
}

function deltaFormulas(step) {
  if (keysResident()) {
    return [`<i>Δ</i><sub>i</sub> = <i>dO</i><sub>i</sub> · <i>O</i><sub>i</sub> for all queries = ${vector(step.delta)}`];
  }
  const i = state.row;
  return [
    `<i>Δ</i> = <i>dO</i> · <i>O</i> = ${vector(data.dO[i])} · ${vector(step.out[i])} = ${strong(number(step.delta[i]))}`,
  ];
}

function formulas() {
  const step = stepNow();
  const who = keysResident() ? "key" : "row";
  if (!step) {
    const start = {
      forward: "Before the first tile: <i>m</i> = −∞, <i>l</i> = 0, <i>O</i> = 0 in each row.",
      dq: "Before the first tile. <i>O</i> and <i>LSE</i> come from the forward; <i>P</i> does not: it is recomputed.",
      dkdv: "Before the first tile. <i>O</i> and <i>LSE</i> come from the forward; <i>P</i> does not: it is recomputed.",
    };
    return [start[state.pass]];
  }
  if (step.kind === "delta") return deltaFormulas(step);
  if (residentOf(step) !== tileOfRow()) {
    const [low, high] = range(residentOf(step), residentBlock(), residentCount());
    return [`This tile has ${who}s ${low} to ${high - 1}. Nothing changes for ${who} ${state.row}.`];
  }
  const r = rowInTile();
  const passed = passedTiles(tileOfRow());
  const before = step.kind === "end" ? passed.at(-1) : passed.at(-2);
  if (state.pass === "forward") {
    return step.kind === "end" ? forwardEnd(step, r, before) : softmaxFormulas(step, r, before);
  }
  return step.kind === "end" ? gradientEnd(step, r, before) : gradientFormulas(step, r, before);
}

// --- tables -------------------------------------------------------------------------------------

function stateRows() {
  const dense = maskOf().dense;
  const last = passedTiles(tileOfRow()).at(-1);
  const end = passOf().steps.slice(0, state.step).find((one) => one.kind === "end" && residentOf(one) === tileOfRow());
  const r = rowInTile();
  const i = state.row;
  const zero = data.q[0].map(() => 0);
  if (state.pass === "forward") {
    return [
      ["m", [last ? last.m[r] : null], null],
      ["l", [last ? last.l[r] : 0], null],
      ["O", last ? last.O[r] : zero, null],
      ["LSE", end ? [end.lse[r]] : null, [dense.lse[i]]],
      ["O / l", end ? end.out[r] : last ? last.now[r] : zero, dense.out[i]],
    ];
  }
  if (state.pass === "dq") {
    return [["dQ", end ? end.dq[r] : last ? last.now[r] : zero, dense.dq[i]]];
  }
  return [
    ["dV", last ? last.dv[r] : zero, dense.dv[i]],
    ["dK", end ? end.dk[r] : last ? last.now[r] : zero, dense.dk[i]],
  ];
}

function cells(values) {
  return values.map((x) => `<td>${show(x)}</td>`).join("");
}

function drawState() {
  const who = keysResident() ? "Key" : "Row";
  at("state-title").textContent = `${who} ${state.row} so far, and by the dense definition`;
  at("state").innerHTML = stateRows()
    .map(([name, now, dense]) => {
      const id = name.replace(/[^A-Za-z]/g, "");
      const rows = [`<tr data-now="${id}"><th scope="row">${name}</th>${now ? cells(now) : "<td>not yet</td>"}</tr>`];
      if (dense) rows.push(`<tr data-dense="${id}"><th scope="row">${name}, dense</th>${cells(dense)}</tr>`);
      return rows.join("");
    })
    .join("");
}

// --- the weights of the row ---------------------------------------------------------------------

// [dense, running] of the row's keys, or of the key's queries; null where no tile has passed.
function weights() {
  const P = maskOf().dense.P;
  const dense = keysResident() ? P.map((row) => row[state.row]) : P[state.row];
  const running = dense.map(() => null);
  const passed = passedTiles(tileOfRow());
  let position = 0;
  for (const step of passed) {
    const [low, high] = range(passingOf(step), passingBlock(), passingCount());
    for (let n = low; n < high; n++) {
      running[n] =
        state.pass === "forward"
          ? passed.at(-1).running[rowInTile()][position++]
          : line(step.P, rowInTile())[n - low];
    }
  }
  return [dense, running];
}

function drawBars() {
  const [dense, running] = weights();
  const forward = state.pass === "forward";
  const what = keysResident() ? `P of key ${state.row}, by query` : `softmax of row ${state.row}, by key`;
  at("bars-title").textContent = what[0].toUpperCase() + what.slice(1);
  at("running-name").textContent = forward ? "of the keys so far" : "recomputed from LSE so far";
  const n = dense.length;
  const top = Math.max(...dense, ...running, 1e-9);
  const parts = [];
  const step = stepNow();
  if (step && step.kind === "tile" && residentOf(step) === tileOfRow()) {
    const [low, high] = range(passingOf(step), passingBlock(), passingCount());
    parts.push(`<rect class="bar-tile" x="${low}" y="0" width="${high - low}" height="100"/>`);
  }
  for (let k = 0; k < n; k++) {
    const tall = (98 * (running[k] ?? 0)) / top;
    const whole = (98 * dense[k]) / top;
    parts.push(`<rect class="bar-running" x="${k + 0.2}" y="${100 - tall}" width="0.6" height="${tall}"/>`);
    if (whole) parts.push(`<rect class="bar-dense" x="${k + 0.1}" y="${100 - whole}" width="0.8" height="${whole}"/>`);
  }
  parts.push(`<path class="base" d="M0 100H${n}"/>`);
  at("bars").setAttribute("viewBox", `-0.3 -1 ${n + 0.6} 102`);
  at("bars").setAttribute("preserveAspectRatio", "none");
  at("bars").innerHTML = parts.join("");
  const side = keysResident() ? "i" : "j";
  const row = (name, xs) => `<tr><th scope="row">${name}</th>${xs.map((x) => `<td>${x}</td>`).join("")}</tr>`;
  at("weights-table").innerHTML =
    row(side, dense.map((_, k) => k)) +
    row("dense", dense.map(show)) +
    row("so far", running.map((x) => (x === null ? "–" : show(x))));
}

// --- the matrix ---------------------------------------------------------------------------------

// The parts that depend on the mask alone; each pair has a cell.
function buildMatrix() {
  const { states, seen } = maskOf();
  const { queries, keys, blockQ, blockK } = data;
  const parts = [
    '<defs><pattern id="hatch" width="0.5" height="0.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">' +
      '<path class="hatch-line" d="M0 0V0.5"/></pattern></defs>',
  ];
  for (let i = 0; i < queries; i++) {
    for (let j = 0; j < keys; j++) {
      parts.push(`<rect class="cell" x="${j}" y="${i}" width="1" height="1" fill-opacity="0"/>`);
    }
  }
  states.forEach((row, I) =>
    row.forEach((kind, J) => {
      const [i0, i1] = range(I, blockQ, queries);
      const [j0, j1] = range(J, blockK, keys);
      const box = `x="${j0 + 0.06}" y="${i0 + 0.06}" width="${j1 - j0 - 0.12}" height="${i1 - i0 - 0.12}"`;
      let path = "";
      if (KINDS[kind] === "partial") {
        for (let i = i0; i < i1; i++) {
          for (let j = j0; j < j1; j++) if (seen[i][j] === "0") path += `M${j} ${i}h1v1h-1z`;
        }
        parts.push(`<path class="hidden-pairs" d="${path}"/>`);
      }
      if (KINDS[kind] === "skipped") {
        parts.push(`<path class="cross" d="M${j0 + 0.2} ${i0 + 0.2}L${j1 - 0.2} ${i1 - 0.2}M${j1 - 0.2} ${i0 + 0.2}L${j0 + 0.2} ${i1 - 0.2}"/>`);
      }
      parts.push(`<rect class="tile ${KINDS[kind]}" ${box}/>`);
    }),
  );
  parts.push('<g id="marks"></g>');
  at("matrix").setAttribute("viewBox", `-1.1 -1.1 ${keys + 1.3} ${queries + 1.3}`);
  at("matrix").innerHTML = parts.join("");
}

// The weight of each pair that a tile has passed, by the latest step of its resident tile.
function pairWeights() {
  const found = new Map();
  const put = (i, j, weight) => found.set(i * data.keys + j, weight);
  const tiles = Math.ceil(residentCount() / residentBlock());
  for (let tile = 0; tile < tiles; tile++) {
    const passed = passedTiles(tile);
    let position = 0;
    for (const step of passed) {
      const [i0, i1] = range(step.i, data.blockQ, data.queries);
      const [j0, j1] = range(step.j, data.blockK, data.keys);
      for (let i = i0; i < i1; i++) {
        for (let j = j0; j < j1; j++) {
          const forward = state.pass === "forward";
          const weight = forward ? passed.at(-1).running[i - i0][position + j - j0] : step.P[i - i0][j - j0];
          put(i, j, weight);
        }
      }
      position += j1 - j0;
    }
  }
  return found;
}

function drawMatrix() {
  const step = stepNow();
  const { queries, keys, blockQ, blockK } = data;
  const found = pairWeights();
  at("matrix").querySelectorAll(":scope > .cell").forEach((cell, n) => {
    const i = Math.floor(n / keys);
    const seen = maskOf().seen[i][n % keys] === "1";
    const weight = found.get(n);
    // a pair that was computed is never blank, however small its weight
    const shade = weight === undefined || !seen ? 0 : 0.1 + 0.9 * Math.sqrt(weight);
    cell.setAttribute("fill-opacity", shade.toFixed(3));
  });
  const across = !keysResident();
  const band = across
    ? `x="0" y="${state.row}" width="${keys}" height="1"`
    : `x="${state.row}" y="0" width="1" height="${queries}"`;
  const parts = [`<rect class="line" ${band}/>`];
  if (step && step.kind !== "delta") {
    if (step.i !== null) {
      const [low, high] = range(step.i, blockQ, queries);
      parts.push(`<rect class="${across ? "resident" : "passing"}" x="-0.95" y="${low + 0.1}" width="0.7" height="${high - low - 0.2}"/>`);
    }
    if (step.j !== null) {
      const [low, high] = range(step.j, blockK, keys);
      parts.push(`<rect class="${across ? "passing" : "resident"}" x="${low + 0.1}" y="-0.95" width="${high - low - 0.2}" height="0.7"/>`);
    }
    if (step.kind === "tile") {
      const [i0, i1] = range(step.i, blockQ, queries);
      const [j0, j1] = range(step.j, blockK, keys);
      parts.push(`<rect class="now" x="${j0}" y="${i0}" width="${j1 - j0}" height="${i1 - i0}"/>`);
    }
  }
  at("marks").innerHTML = parts.join("");
}

function drawCounts() {
  const flat = maskOf().states.flat();
  const count = (kind) => flat.filter((x) => KINDS[x] === kind).length;
  const step = stepNow();
  const [full, partial] = step ? step.done : [0, 0];
  const steps = passOf().steps;
  const bytes = (n) => `${n.toLocaleString("en")} bytes`;
  const rows = [
    ["full tiles", `${full} of ${count("full")}`],
    ["partial tiles", `${partial} of ${count("partial")}`],
    ["skipped tiles", `${count("skipped")} of ${flat.length} are never read`],
    ["read so far", `${bytes(step ? step.read : 0)} of ${bytes(steps.at(-1).read)}`],
    ["without skipping", bytes(passOf().unskipped)],
  ];
  at("counts").innerHTML = rows.map(([name, text]) => `<dt>${name}</dt><dd>${text}</dd>`).join("");
}

// --- the whole page -----------------------------------------------------------------------------

function describe() {
  const step = stepNow();
  const total = passOf().steps.length;
  const start = `Step ${state.step} of ${total}`;
  if (!step) return `${start}: nothing is read yet.`;
  if (step.kind === "delta") return `${start}: Δ of every query, before the tiles.`;
  const rows = (name, tile, block, count) => {
    const [low, high] = range(tile, block, count);
    return `${name} ${low} to ${high - 1}`;
  };
  const queries = step.i === null ? "" : rows("queries", step.i, data.blockQ, data.queries);
  const keys = step.j === null ? "" : rows("keys", step.j, data.blockK, data.keys);
  if (step.kind === "end") return `${start}: ${keysResident() ? keys : queries} are done, and their results are written.`;
  const kind = KINDS[maskOf().states[step.i][step.j]];
  const pair = keysResident() ? `${keys} stay, ${queries} pass` : `${queries} stay, ${keys} pass`;
  return `${start}: ${pair}; a ${kind} tile.`;
}

function draw() {
  at("slider").max = passOf().steps.length;
  at("slider").value = state.step;
  at("row").value = state.row;
  const text = describe();
  at("slider").setAttribute("aria-valuetext", text);
  at("status").setAttribute("aria-live", state.timer ? "off" : "polite");
  at("status").textContent = text;
  at("formulas").innerHTML = formulas().map(formula).join("");
  at("play").textContent = state.timer ? "Pause" : "Play";
  drawState();
  drawBars();
  drawMatrix();
  drawCounts();
}

// Keep the place within its tile while the tiles change.
function followTile() {
  const step = stepNow();
  if (!at("follow").checked || !step || step.kind === "delta") return;
  const [low, high] = range(residentOf(step), residentBlock(), residentCount());
  state.row = Math.min(high - 1, low + rowInTile());
}

function goTo(step) {
  state.step = Math.max(0, Math.min(passOf().steps.length, step));
  followTile();
  draw();
}

function stop() {
  clearInterval(state.timer);
  state.timer = 0;
}

function play() {
  if (state.timer) {
    stop();
    draw();
    return;
  }
  if (state.step === passOf().steps.length) state.step = 0;
  state.timer = setInterval(() => {
    if (state.step + 1 >= passOf().steps.length) stop();
    goTo(state.step + 1);
  }, 1000 / Number(at("speed").value));
  goTo(state.step + 1);
}

function stepBy(n) {
  stop();
  goTo(state.step + n);
}

function choose() {
  stop();
  state.mask = at("mask").value;
  state.pass = at("pass").value;
  state.step = 0;
  state.row = Math.min(state.row, residentCount() - 1);
  at("row-name").textContent = keysResident() ? "Key" : "Row";
  at("row").innerHTML = Array.from({ length: residentCount() }, (_, n) => `<option>${n}</option>`).join("");
  buildMatrix();
  at("picture-title").textContent = `Scores: ${state.mask === "none" ? "no mask" : state.mask}, ${maskOf().text}`;
  draw();
}

function chooseRow(row) {
  if (row < 0 || row >= residentCount()) return;
  state.row = row;
  const step = stepNow();
  if (step && step.kind !== "delta" && residentOf(step) !== tileOfRow()) at("follow").checked = false;
  draw();
}

function setTheme(theme) {
  at("theme").textContent = `Theme: ${theme}`;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("rowmax-theme", theme);
  } catch {
    // storage may be closed to files: the choice then lasts as long as the page
  }
}

function savedTheme() {
  try {
    const theme = localStorage.getItem("rowmax-theme");
    return THEMES.includes(theme) ? theme : "system";
  } catch {
    return "system";
  }
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
}

function nextOption(select) {
  select.selectedIndex = (select.selectedIndex + 1) % select.options.length;
  choose();
}

const SHORTCUTS = {
  ArrowLeft: () => stepBy(-1),
  ArrowRight: () => stepBy(1),
  Home: () => stepBy(-Infinity),
  End: () => stepBy(Infinity),
  r: () => chooseRow(state.row + 1),
  R: () => chooseRow(state.row - 1),
  " ": play,
  m: () => nextOption(at("mask")),
  p: () => nextOption(at("pass")),
  t: nextTheme,
};

function onKey(event) {
  if (!at("shortcuts").checked || event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  const has = (names) => target.closest?.(names);
  // a control has these keys already
  if (has("select")) return;
  if (event.key === " " && has("button, summary, input[type=checkbox]")) return;
  if (event.key.startsWith("Arrow") && has(".wide")) return;
  const action = SHORTCUTS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function onClick(event) {
  const svg = at("matrix");
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  chooseRow(Math.floor(keysResident() ? point.x : point.y));
}

function begin() {
  at("lede").textContent =
    `One head, ${data.queries} queries and ${data.keys} keys of ${data.headDim} numbers, in tiles of ` +
    `${data.blockQ} by ${data.blockK}. The score matrix is never stored: one tile of it exists at a time, ` +
    "and a few numbers of each row stay. At the end they equal the dense softmax in every printed digit.";
  at("note").textContent =
    `All numbers were computed in float64 by rowmax's own rules (seed ${data.seed}, scale ${data.scale}` +
    (data.softcap ? `, softcap ${data.softcap}` : "") +
    `) and are rounded to ${data.digits} digits. Bytes are those of float32, ${data.bytes} a number. ` +
    "On a GPU the resident tiles are computed in parallel; here one follows another.";
  at("mask").innerHTML = data.masks
    .map((one) => `<option value="${one.name}">${one.name}</option>`)
    .join("");
  at("mask").value = data.first;
  setTheme(savedTheme());
  at("mask").addEventListener("change", choose);
  at("pass").addEventListener("change", choose);
  at("row").addEventListener("change", () => chooseRow(Number(at("row").value)));
  at("choices").addEventListener("submit", (event) => event.preventDefault());
  at("slider").addEventListener("input", () => stepBy(Number(at("slider").value) - state.step));
  at("to-start").addEventListener("click", () => stepBy(-Infinity));
  at("back").addEventListener("click", () => stepBy(-1));
  at("play").addEventListener("click", play);
  at("forth").addEventListener("click", () => stepBy(1));
  at("to-end").addEventListener("click", () => stepBy(Infinity));
  at("speed").addEventListener("change", () => {
    if (state.timer) {
      stop();
      play();
    }
  });
  at("follow").addEventListener("change", () => goTo(state.step));
  at("theme").addEventListener("click", nextTheme);
  at("matrix").addEventListener("click", onClick);
  document.addEventListener("keydown", onKey);
  choose();
}

begin();
