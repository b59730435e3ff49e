"use strict";
(() => {
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const stage = document.getElementById("stage");
  const views = data.against ? ["clean", data.against] : ["clean"];
  const steps = stepsOf(data.models);
  const state = { image: 0, step: steps.length - 1, head: -1, row: 0, column: 0, prefix: -1, strength: 85, shared: true };

  // Values are kept as levels of their square root.
  const SQUARE = Float32Array.from({ length: data.levels + 1 }, (_, level) => (level / data.levels) ** 2);
  const OVERLAY = ramp([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]]);
  const MATRIX = ramp([[255, 255, 255], [253, 187, 132], [215, 48, 31], [103, 0, 13]]);

  function ramp(stops) {
    const colours = new Uint8ClampedArray(256 * 3);
    for (let i = 0; i < 256; i++) {
      const place = (i / 255) * (stops.length - 1), from = Math.min(Math.floor(place), stops.length - 2);
      for (let c = 0; c < 3; c++) colours[3 * i + c] = stops[from][c] + (stops[from + 1][c] - stops[from][c]) * (place - from);
    }
    return colours;
  }

  // The layer slider: for each step, the number of a layer for every model. Models of one depth are compared layer by
  // layer; models of different depths from the first of their layers in the page to the last.
  function stepsOf(models) {
    const alike = models.every((model) => model.blocks === models[0].blocks);
    const depths = models.map((model) => model.layers.map((layer) => layer.depth));
    const common = depths[0].filter((depth) => depths.every((other) => other.includes(depth)));
    if (alike && common.length) return common.map((depth) => depths.map((other) => other.indexOf(depth)));
    const most = Math.max(...depths.map((other) => other.length));
    return Array.from({ length: most }, (_, step) => depths.map((other) => Math.round((step / Math.max(1, most - 1)) * (other.length - 1))));
  }

  // Layers that the page holds for some models only cannot be put side by side.
  function unshared() {
    if (!data.models.every((model) => model.blocks === data.models[0].blocks)) return [];
    const shown = new Set(data.models.flatMap((model, m) => steps.map((step) => model.layers[step[m]].depth)));
    const absent = [...new Set(data.models.flatMap((model) => model.layers.map((layer) => layer.depth)))].filter((depth) => !shown.has(depth)).sort((a, b) => a - b);
    return absent.length ? [`Not shown, because the page has them for some of the models only: layer${absent.length > 1 ? "s" : ""} ${absent.join(", ")}.`] : [];
  }
  function imageKeys() {
    const last = Math.min(9, data.images.length);
    return last < 2 ? [] : [create("kbd", {}, "1"), "–", create("kbd", {}, last), " image  "];
  }

  const create = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value); else element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  };

  // A slider with its name and value; the value is text.
  function slider(name, least, most, key, words) {
    const output = create("output");
    const input = create("input", { type: "range", min: least, max: most, step: 1, "aria-label": name, "data-control": key,
      oninput: () => { state[key] = Number(input.value); changed(); } });
    const box = create("div", {}, create("label", {}, `${name}: `, output, input));
    box.show = () => { input.value = state[key]; output.textContent = words(); input.setAttribute("aria-valuetext", words()); };
    return box;
  }

  const layerOf = (model) => model.layers[steps[state.step][data.models.indexOf(model)]];
  const headOf = (layer) => (layer.each && state.head >= 0 ? Math.min(state.head, layer.heads - 1) : -1);
  const heads = Math.max(...data.models.flatMap((model) => model.layers.map((layer) => (layer.each ? layer.heads : 0))));
  const first = () => layerOf(data.models[0]);

  function layerWords() { return data.models.length > 1 ? [...new Set(data.models.map((model) => layerOf(model).depth))].join(" / ") : String(first().depth); }
  function headWords() {
    if (!data.models.some((model) => layerOf(model).each)) return "average (the page has no single heads of this layer)";
    return state.head < 0 ? "average" : String(state.head);
  }
  const sliders = [
    slider("Layer", 0, steps.length - 1, "step", layerWords),
    slider("Head", -1, heads - 1, "head", headWords),
    slider("Overlay", 0, 100, "strength", () => `${state.strength} %`),
  ];
  const shared = create("input", { type: "checkbox", "data-control": "shared", onchange: () => { state.shared = shared.checked; changed(); } });
  const token = create("select", { "aria-label": "Token", onchange: () => { state.prefix = Number(token.value); changed(); } });
  const thumbs = create("div", { class: "thumbs", role: "group", "aria-label": "Images" });
  data.images.forEach((image, index) => thumbs.append(create("button",
    { type: "button", title: image.name, "data-image": index, onclick: () => { state.image = index; changed(); } },
    create("img", { src: image.views[0], alt: image.name }))));

  const panels = [];
  const grid = create("div", { class: "panels", style: `--views:${views.length}` });
  data.models.forEach((model, m) => views.forEach((view, v) => {
    const photo = create("canvas", { role: "img" }), matrix = create("canvas", { role: "img" }), words = create("p");
    const panel = { model, m, v, photo, matrix, words };
    panels.push(panel);
    grid.append(create("figure", { class: "panel", "data-panel": `${m}.${v}` }, create("h3", {}, `${model.name} · ${view}`),
      create("div", { class: "pair" }, photo, matrix), words));
    follow(photo, (x, y) => pointAtPhoto(panel, x, y));
    follow(matrix, (x, y) => pointAtMatrix(panel, x, y));
  }));
  const bars = [create("canvas", { width: 128, height: 8 }), create("canvas", { width: 128, height: 8 })];
  const tops = [create("span"), create("span")];
  const status = create("p", { class: "quiet", "aria-live": "polite", id: "said" });
  stage.setAttribute("tabindex", "0");
  stage.setAttribute("aria-label", "Attention explorer. Arrow keys move the patch, Page Up and Page Down change the layer, H the head, number keys the image, C the class token.");
  stage.append(
    create("p", {}, "Point at a patch of a photograph: the colours show what its token attends to. The square beside it is the layer’s whole attention map, with one row per query and one column per key. A vertical line is a token that all others attend to: overfocus."),
    create("div", { class: "controls" }, ...sliders, create("div", {}, create("label", {}, "Token ", token),
      create("label", {}, shared, " same colour scale for all"))), thumbs, grid,
    create("div", { class: "legend" }, create("span", {}, "attention of the chosen token: 0 ", bars[0], " ", tops[0]),
      create("span", {}, "map: 0 ", bars[1], " ", tops[1]), create("span", {}, "bars above a map: the mean attention each token receives")), status,
    create("p", { class: "quiet" }, create("kbd", {}, "←↑↓→"), " patch  ", create("kbd", {}, "PgUp"), " ", create("kbd", {}, "PgDn"), " layer  ",
      create("kbd", {}, "H"), " head  ", ...imageKeys(), create("kbd", {}, "C"), " class token"),
    ...[...data.notes, ...unshared()].map((note) => create("p", { class: "quiet" }, note)));
  [OVERLAY, MATRIX].forEach((colours, i) => {
    const context = bars[i].getContext("2d");
    for (let x = 0; x < 128; x++) { context.fillStyle = `rgb(${[...colours.slice(6 * x, 6 * x + 3)]})`; context.fillRect(x, 0, 1, 8); }
  });

  // Mouse, pen and touch; vertical swipes still scroll the page.
  function follow(canvas, act) {
    const handle = (event) => {
      const box = canvas.getBoundingClientRect();
      act((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    canvas.addEventListener("pointermove", handle);
    canvas.addEventListener("pointerdown", handle);
  }
  const within = (value, count) => Math.max(0, Math.min(count - 1, Math.floor(value)));
  function pointAtPhoto(panel, x, y) {
    // The patch is kept on the grid of the first model; others take the patch at the same place.
    const [rows, columns] = first().queries;
    point(within(y * rows, rows), within(x * columns, columns));
  }
  const STRIP = 0.12;
  function pointAtMatrix(panel, x, y) {
    const layer = layerOf(panel.model), [rows, columns] = layer.queries;
    const query = within(((y - STRIP) / (1 - STRIP)) * (layer.prefix + rows * columns), layer.prefix + rows * columns);
    if (query < layer.prefix) { state.prefix = query; changed(); return; }
    const patch = query - layer.prefix, [ownRows, ownColumns] = first().queries;
    point(within(((Math.floor(patch / columns) + 0.5) / rows) * ownRows, ownRows), within((((patch % columns) + 0.5) / columns) * ownColumns, ownColumns));
  }
  function point(row, column) {
    if (row === state.row && column === state.column && state.prefix < 0) return;
    Object.assign(state, { row, column, prefix: -1 });
    changed();
  }

  stage.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || (event.target !== stage && event.target.matches("input, select"))) return;
    const [rows, columns] = first().queries, move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (move) point(within(state.row + move[0], rows), within(state.column + move[1], columns));
    else if (event.key === "PageUp") state.step = Math.min(steps.length - 1, state.step + 1);
    else if (event.key === "PageDown") state.step = Math.max(0, state.step - 1);
    else if (event.key === "h") state.head = state.head + 1 >= heads ? -1 : state.head + 1;
    else if (event.key === "H") state.head = state.head < 0 ? heads - 1 : state.head - 1;
    else if (event.key.toLowerCase() === "c" && first().prefix) state.prefix = state.prefix < 0 ? 0 : -1;
    else if (/^[1-9]$/.test(event.key) && Number(event.key) <= data.images.length) state.image = Number(event.key) - 1;
    else return;
    event.preventDefault();
    changed();
  });

  // Maps are unpacked when they are first shown.
  const unpacked = new Map();
  async function maps(model, layer, image, v) {
    const blob = layer.maps[image][v];
    if (!unpacked.has(blob)) {
      unpacked.set(blob, (async () => {
        const bytes = Uint8Array.from(atob(blob.d), (c) => c.charCodeAt(0));
        const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
        const levels = new Uint8Array(await new Response(stream).arrayBuffer());
        const count = blob.m.length, size = levels.length / count;
        const each = blob.m.map((top, i) => Float32Array.from(levels.subarray(i * size, (i + 1) * size), (level) => SQUARE[level] * top));
        let mean = each[0];
        if (count > 1) { mean = new Float32Array(size); for (const one of each) for (let i = 0; i < size; i++) mean[i] += one[i] / count; }
        return { mean, each };
      })());
    }
    return unpacked.get(blob);
  }
  const loaded = new Map();
  async function photograph(image, v) {
    const address = data.images[image].views[v];
    if (!loaded.has(address)) {
      loaded.set(address, (async () => {
        const picture = new Image();
        picture.src = address;
        await picture.decode();
        const grey = create("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
        const context = grey.getContext("2d", { willReadFrequently: true });
        context.drawImage(picture, 0, 0);
        const pixels = context.getImageData(0, 0, grey.width, grey.height);
        for (let i = 0; i < pixels.data.length; i += 4) {
          const light = 0.299 * pixels.data[i] + 0.587 * pixels.data[i + 1] + 0.114 * pixels.data[i + 2];
          pixels.data[i] = pixels.data[i + 1] = pixels.data[i + 2] = light;
        }
        context.putImageData(pixels, 0, 0);
        return { picture, grey };
      })());
    }
    return loaded.get(address);
  }

  function queryOf(layer) {
    if (state.prefix >= 0 && state.prefix < layer.prefix) return state.prefix;
    const [rows, columns] = layer.queries, [ownRows, ownColumns] = first().queries;
    const row = within(((state.row + 0.5) / ownRows) * rows, rows), column = within(((state.column + 0.5) / ownColumns) * columns, columns);
    return layer.prefix + row * columns + column;
  }

  // What a panel shows: the map and the chosen row of it.
  async function look(panel) {
    const layer = layerOf(panel.model), head = headOf(layer);
    const found = await maps(panel.model, layer, state.image, panel.v);
    const map = head < 0 ? found.mean : found.each[head];
    const queries = layer.prefix + layer.queries[0] * layer.queries[1], keys = layer.prefix + layer.keys[0] * layer.keys[1];
    const query = queryOf(layer), row = new Float32Array(keys);
    for (let key = 0; key < keys; key++) row[key] = map[key * queries + query];
    const share = layer.maps[state.image][panel.v].o[head < 0 ? 0 : head + 1];
    const photo = await photograph(state.image, panel.v);
    return { panel, layer, head, map, queries, keys, query, row, share, photo };
  }

  function drawPhoto(seen, top) {
    const { panel, layer, row, query, photo } = seen, canvas = panel.photo;
    const [rows, columns] = layer.keys, width = 448, height = Math.round((448 * photo.grey.height) / photo.grey.width);
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const context = canvas.getContext("2d");
    const strength = state.strength / 100;
    context.imageSmoothingEnabled = photo.grey.width > 128;
    context.globalAlpha = 1;
    context.drawImage(strength > 0 ? photo.grey : photo.picture, 0, 0, width, height);
    const small = create("canvas", { width: columns, height: rows }), pixels = new ImageData(columns, rows);
    for (let i = 0; i < rows * columns; i++) {
      const level = Math.min(255, Math.round((255 * row[layer.prefix + i]) / top));
      for (let c = 0; c < 3; c++) pixels.data[4 * i + c] = OVERLAY[3 * level + c];
      pixels.data[4 * i + 3] = 255 * (0.2 + 0.8 * Math.sqrt(level / 255));  // keeps the photograph visible where attention is low
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.globalAlpha = strength;
    context.drawImage(small, 0, 0, width, height);
    context.globalAlpha = 1;
    if (query >= layer.prefix) {
      const [queryRows, queryColumns] = layer.queries, patch = query - layer.prefix;
      const w = width / queryColumns, h = height / queryRows, x = (patch % queryColumns) * w, y = Math.floor(patch / queryColumns) * h;
      for (const [colour, thick] of [["#fff", 5], ["#0072b2", 2.5]]) { context.strokeStyle = colour; context.lineWidth = thick; context.strokeRect(x, y, w, h); }
    }
  }

  // A map is painted once per scale; pointing only moves the frame of the row.
  const painted = new WeakMap();
  function paintedMatrix({ map, queries, keys }, top) {
    const before = painted.get(map);
    if (before && before.top === top) return before;
    const small = create("canvas", { width: keys, height: queries }), pixels = new ImageData(keys, queries), given = new Float32Array(keys);
    for (let key = 0; key < keys; key++) {
      for (let q = 0; q < queries; q++) {
        const value = map[key * queries + q], level = Math.min(255, Math.round((255 * value) / top)), at = 4 * (q * keys + key);
        given[key] += value / queries;
        pixels.data[at] = MATRIX[3 * level]; pixels.data[at + 1] = MATRIX[3 * level + 1]; pixels.data[at + 2] = MATRIX[3 * level + 2]; pixels.data[at + 3] = 255;
      }
    }
    small.getContext("2d").putImageData(pixels, 0, 0);
    painted.set(map, { top, small, given });
    return painted.get(map);
  }

  function drawMatrix(seen, top, most) {
    const { panel, queries, keys, query } = seen, canvas = panel.matrix, size = 448, strip = Math.round(size * STRIP);
    if (canvas.width !== size) { canvas.width = size; canvas.height = size; }
    const context = canvas.getContext("2d");
    const { small, given } = paintedMatrix(seen, top);
    const style = getComputedStyle(stage);
    context.fillStyle = style.getPropertyValue("--soft");
    context.fillRect(0, 0, size, strip);
    context.fillStyle = style.getPropertyValue("--c1");
    for (let key = 0; key < keys; key++) {
      const tall = Math.min(1, given[key] / most) * (strip - 4);
      context.fillRect((key * size) / keys, strip - 2 - tall, Math.max(1, size / keys), tall);
    }
    context.imageSmoothingEnabled = keys > size;
    context.drawImage(small, 0, strip, size, size - strip);
    const y = strip + ((query + 0.5) * (size - strip)) / queries;
    context.strokeStyle = "#0072b2";
    context.lineWidth = 2;
    context.strokeRect(1, y - Math.max(2, (size - strip) / queries / 2), size - 2, Math.max(4, (size - strip) / queries));
  }

  function quantile(values, part) {
    const sorted = Float32Array.from(values).sort();
    return sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
  }
  const tailOf = new WeakMap();
  function tail(map) {
    if (!tailOf.has(map)) tailOf.set(map, quantile(map, 0.995));
    return tailOf.get(map);
  }
  const percent = (value) => `${(100 * value).toPrecision(value < 0.1 ? 2 : 3)} %`;
  function tokenName(layer, index) { return layer.class && index === 0 ? "class token" : `token ${index} before the patches`; }

  function tell(seen) {
    const { layer, row, head, share, panel } = seen;
    const best = row.slice(layer.prefix).reduce((at, value, i, all) => (value > all[at] ? i : at), 0);
    const parts = [`layer ${layer.depth}, ${head < 0 ? "average of heads" : `head ${head}`}`,
      `strongest patch: ${percent(row[layer.prefix + best])} at row ${Math.floor(best / layer.keys[1])}, column ${best % layer.keys[1]}`];
    for (let i = 0; i < layer.prefix; i++) parts.push(`${tokenName(layer, i)}: ${percent(row[i])}`);
    parts.push(`5 % of the tokens receive ${Math.round(100 * share)} % of all attention`);
    panel.words.textContent = `${parts.join("; ")}.`;
    panel.photo.setAttribute("aria-label", parts.join("; "));
    panel.matrix.setAttribute("aria-label", `map of layer ${layer.depth}: ${seen.queries} by ${seen.keys} tokens`);
  }

  function showControls() {
    for (const one of sliders) one.show();
    shared.checked = state.shared;
    thumbs.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", i === state.image));
    const layer = first(), options = [create("option", { value: -1 }, "the patch pointed at")];
    for (let i = 0; i < layer.prefix; i++) options.push(create("option", { value: i }, tokenName(layer, i)));
    token.replaceChildren(...options);
    if (state.prefix >= layer.prefix) state.prefix = -1;
    token.value = state.prefix;
    const [rows, columns] = layer.queries;
    state.row = within(state.row, rows);
    state.column = within(state.column, columns);
    const where = state.prefix >= 0 ? tokenName(layer, state.prefix) : `patch in row ${state.row}, column ${state.column}`;
    status.textContent = `${data.images[state.image].name}, layer ${layerWords()}, head ${headWords()}: ${where}.`;
  }

  let due = 0;
  async function render(turn) {
    const all = await Promise.all(panels.map(look));
    if (turn !== due) return;
    const top = Math.max(1e-9, ...all.map((seen) => Math.max(...seen.row.subarray(seen.layer.prefix))));
    const mapTop = Math.max(1e-9, ...all.map((seen) => tail(seen.map)));
    const most = Math.max(1e-9, ...all.map(receivedMost));
    for (const seen of all) {
      drawPhoto(seen, state.shared ? top : Math.max(1e-9, ...seen.row.subarray(seen.layer.prefix)));
      drawMatrix(seen, state.shared ? mapTop : Math.max(1e-9, tail(seen.map)), state.shared ? most : Math.max(1e-9, receivedMost(seen)));
      tell(seen);
    }
    tops[0].textContent = state.shared ? percent(top) : "the panel’s strongest";
    tops[1].textContent = state.shared ? `${percent(mapTop)} or more` : "the panel’s strongest 0.5 %";
    stage.setAttribute("aria-busy", "false");
  }
  const mostOf = new WeakMap();
  function receivedMost({ map, queries, keys }) {
    if (!mostOf.has(map)) {
      let most = 0;
      for (let key = 0; key < keys; key++) { let sum = 0; for (let q = 0; q < queries; q++) sum += map[key * queries + q]; most = Math.max(most, sum / queries); }
      mostOf.set(map, most);
    }
    return mostOf.get(map);
  }
  function changed() { showControls(); stage.setAttribute("aria-busy", "true"); const turn = ++due; requestAnimationFrame(() => { if (turn === due) render(turn).catch(complain); }); }
  function complain(error) {
    stage.setAttribute("aria-busy", "false");
    status.textContent = typeof DecompressionStream === "undefined" ? "This browser is too old to unpack the maps." : `The maps cannot be shown: ${error.message}`;
  }
  { const [rows, columns] = first().queries; state.row = Math.floor(rows / 2); state.column = Math.floor(columns / 2); }
  document.addEventListener("themechange", changed);
  document.addEventListener("explorershown", changed);
  changed();
})();
